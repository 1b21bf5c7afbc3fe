#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "fsdp/policy.h"
#include "shard/buffer_pool.h"
#include "shard/fsdp_param.h"
#include "shard/mesh_info.h"

namespace fsdp {

/// Which tensors the modules of a group compute with, and what memory it holds.
/// Source: PyTorch 2.13, torch.distributed.fsdp._fully_shard._fsdp_param.ShardedState.
enum class ShardedState {
  kSharded,             ///< the shards alone
  kShardedPostForward,  ///< the shards, and 1/k of the unsharded parameters for backward
  kUnsharded,           ///< the shards and the unsharded parameters
};

/// A parameter that is to be cut. It was checked before: contiguous, and can be cut along
/// `shard_dim`.
struct ParamToShard {
  at::Tensor tensor;
  std::string name;  ///< in the sharded module
  int64_t shard_dim = 0;
  size_t module = 0;  ///< which of the modules that are sharded together
};

/// The parameters of one group and the memory that they share, in one of the two layouts.
///
/// All that the layouts differ in is here, in the gather and in the reduction's copy-in.
class ShardedParams {
 public:
  /// Cuts the parameters and frees them. Layout::kFlat becomes kPerParameter if one is to be cut
  /// along another dimension than 0.
  ///
  /// kFlat makes one flat parameter of those that require grad and one of those that do not; one
  /// more for each further dtype, and where a row's length makes it worth while.
  ShardedParams(const std::vector<ParamToShard>& params, const FSDPMeshInfo& mesh_info,
                Layout layout, c10::Device device);
  ShardedParams(const ShardedParams&) = delete;
  ShardedParams& operator=(const ShardedParams&) = delete;

  [[nodiscard]] Layout layout() const { return layout_; }
  [[nodiscard]] std::vector<FSDPParam>& params() { return params_; }
  [[nodiscard]] const std::vector<FSDPParam>& params() const { return params_; }
  [[nodiscard]] const std::vector<std::unique_ptr<FlatParam>>& flats() const { return flats_; }
  /// kFlat: the storage of all unsharded parameters.
  [[nodiscard]] const at::Storage& storage() const { return storages_.front(); }
  [[nodiscard]] c10::Device device() const { return device_; }
  /// Of gathers and reductions.
  [[nodiscard]] const std::shared_ptr<BufferPool>& pool() const { return pool_; }
  void set_pool(std::shared_ptr<BufferPool> pool) { pool_ = std::move(pool); }
  [[nodiscard]] ShardedState sharded_state() const { return sharded_state_; }

  /// Gives the parameters their names from the root: the path of their module, and their own.
  void set_fqns(const std::vector<std::string>& module_paths);
  /// Takes the dtypes of the policy: unsharded parameters get their compute dtype. While sharded.
  void init_dtypes(const MixedPrecisionPolicy& policy);
  /// The dtype of the reduction: that of the policy, else that of the gradients.
  [[nodiscard]] at::ScalarType reduce_dtype() const;

  /// Whether no sharded parameter was moved off the flat shard by torch::load, to() or set_data().
  [[nodiscard]] bool are_in_place() const;
  /// Brings those that were back onto it, with their values. Streams: copies on the current one.
  /// Errors: StateError if a shape or a device has changed, or dtypes in one flat parameter differ.
  void take_back_sharded_params();

  /// kPerParameter: gives the storages of the unsharded parameters bytes, to be written.
  void allocate_unsharded();
  /// kFlat: bytes of the unsharded parameters' size, over which FlatParam::gathered() lie, to be
  /// filled while the parameters themselves are still freed. Streams: allocated on the current one.
  void allocate_gathered();
  /// kFlat: they become the unsharded parameters'.
  void adopt_gathered();
  /// kFlat: frees them instead. Streams: on the one that they were allocated on.
  void drop_gathered();
  /// kFlat: leaves them to a collective that failed, and may still write to them.
  void abandon_gathered();

  // The transitions between states, of all parameters at once: in the flat layout they share their
  // bytes. Each does nothing in the state that it leads to. Those that free return the flat
  // layout's bytes, which the caller keeps until their last use is over; other bytes are free at
  // once.
  /// Frees the unsharded parameters, and what was kept of them.
  at::DataPtr to_sharded();
  /// Frees the unsharded parameters, but for one of the parts that the ranks of `mesh_info` which
  /// shard keep. Nothing unless unsharded.
  at::DataPtr to_sharded_post_forward(const FSDPMeshInfo& mesh_info);
  /// The unsharded parameters have been gathered: nothing else is kept of them.
  void to_unsharded();

 private:
  void cut(const std::vector<ParamToShard>& params, const FSDPMeshInfo& mesh_info);
  void cut_flat(const std::vector<ParamToShard>& params, const FSDPMeshInfo& mesh_info);
  void check_device() const;
  void make_gather_storage();
  void describe_access_errors();
  at::DataPtr free_unsharded();

  Layout layout_;
  c10::Device device_;
  std::vector<FSDPParam> params_;
  std::vector<size_t> module_of_;  // of each
  std::vector<std::unique_ptr<FlatParam>> flats_;
  std::vector<at::Storage> storages_;  // of the unsharded parameters: one; or one for each
  std::shared_ptr<BufferPool> pool_;
  at::Storage gather_storage_;              // kFlat: has bytes while a gather is in flight
  std::vector<std::string> access_errors_;  // what a use of them says while they are freed
  ShardedState sharded_state_ = ShardedState::kSharded;
  std::optional<at::ScalarType> reduce_dtype_;
};

}  // namespace fsdp
