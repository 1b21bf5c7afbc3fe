#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace fsdp {

/// The memory of the parameters that are cut as one: this rank's flat shard, and the flat
/// *unsharded* tensor that all ranks' shards make when they are gathered.
///
/// Layout::kFlat has one or a few for a group, Layout::kPerParameter one for each parameter. Where
/// each parameter lies in it says FSDPParam.
class FlatParam {
 public:
  /// Memory: `shard_numel` elements, zeros.
  FlatParam(int64_t shard_numel, int64_t world_size, at::ScalarType dtype, c10::Device device);

  /// 1-D of shard_numel(), in the original dtype. Sharded parameters are parts of it, and what is
  /// between them stays zero.
  [[nodiscard]] const at::Tensor& shard() const { return shard_; }
  void set_shard(at::Tensor shard) { shard_ = std::move(shard); }
  [[nodiscard]] int64_t shard_numel() const { return shard_numel_; }
  [[nodiscard]] at::ScalarType orig_dtype() const { return shard_.scalar_type(); }

  /// 1-D of unsharded_numel(), over a storage that has bytes only while unsharded. A version
  /// counter of its own: what is written through it is no edit to autograd.
  [[nodiscard]] const at::Tensor& unsharded() const { return unsharded_; }
  void set_unsharded(at::Tensor unsharded) { unsharded_ = std::move(unsharded); }
  /// The same over the storage that a gather in flight writes to (kFlat).
  [[nodiscard]] const at::Tensor& gathered() const { return gathered_; }
  void set_gathered(at::Tensor gathered) { gathered_ = std::move(gathered); }
  [[nodiscard]] int64_t unsharded_numel() const { return shard_numel_ * world_size_; }
  [[nodiscard]] at::ScalarType compute_dtype() const { return unsharded_.scalar_type(); }

  /// Keeps the `rank`-th of `world_size` equal parts of the unsharded tensor, for a gather over
  /// fewer ranks.
  void keep_post_forward_shard(int64_t world_size, int64_t rank);
  void drop_post_forward_shard() { post_forward_shard_.reset(); }

  /// What this rank sends into a gather: its post-forward shard, in the compute dtype, if it keeps
  /// one; else its shard, which the caller converts.
  [[nodiscard]] const at::Tensor& all_gather_input() const {
    return post_forward_shard_.defined() ? post_forward_shard_ : shard_;
  }
  [[nodiscard]] bool has_post_forward_shard() const { return post_forward_shard_.defined(); }

 private:
  int64_t shard_numel_;
  int64_t world_size_;
  at::Tensor shard_;
  at::Tensor unsharded_;
  at::Tensor gathered_;
  at::Tensor post_forward_shard_;
};

}  // namespace fsdp
