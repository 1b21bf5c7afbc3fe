#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "fsdp/policy.h"
#include "shard/mesh_info.h"
#include "shard/sharded_spec.h"

namespace fsdp {

/// Which of its tensors a parameter's module computes with, and what memory it holds.
/// Source: PyTorch 2.13, torch.distributed.fsdp._fully_shard._fsdp_param.ShardedState.
enum class ShardedState {
  kSharded,             ///< the shard alone
  kShardedPostForward,  ///< the shard, and 1/k of the unsharded parameter for backward
  kUnsharded,           ///< the shard and the unsharded parameter
};

/// One parameter, by its two handles.
///
/// The *unsharded parameter* is the tensor that the module's member holds; its identity never
/// changes, its storage is freed while sharded. The *sharded parameter* takes its place in the
/// module's dictionary, for optimizers. Nothing is exchanged when the state changes.
class FSDPParam {
 public:
  /// Cuts `param`, which is checked before (contiguous, can be cut along `shard_dim`), and frees
  /// it.
  FSDPParam(at::Tensor param, std::string name, const FSDPMeshInfo& mesh_info, int64_t shard_dim,
            c10::Device device);

  [[nodiscard]] const at::Tensor& sharded_param() const { return sharded_param_; }
  [[nodiscard]] const at::Tensor& unsharded_param() const { return unsharded_param_; }
  [[nodiscard]] const ShardedTensorSpecPtr& spec() const { return spec_; }
  [[nodiscard]] const std::string& name() const { return name_; }  ///< in the sharded module
  void set_fqn(const std::string& fqn);

  /// Takes the dtypes of the policy: the unsharded parameter gets its compute dtype, once.
  void init_dtypes(const MixedPrecisionPolicy& policy);
  [[nodiscard]] at::ScalarType orig_dtype() const { return sharded_param_.scalar_type(); }
  [[nodiscard]] at::ScalarType compute_dtype() const { return unsharded_param_.scalar_type(); }
  /// The dtype to reduce in; unset: that of the gradient.
  [[nodiscard]] std::optional<at::ScalarType> reduce_dtype() const { return reduce_dtype_; }

  /// Brings the sharded parameter back onto its padded flat shard where torch::load, to() or
  /// set_data() moved it off: its values are kept. Returns whether it had been moved.
  /// Errors: StateError if its shape has changed.
  bool reset_sharded_param();
  /// Whether the sharded parameter was written to, or moved, since the last gather began.
  [[nodiscard]] bool changed_since_gather() const;
  void note_gather() { gathered_version_ = sharded_param_._version(); }
  /// Freezing and unfreezing is done on the sharded parameter; takes it over.
  void sync_requires_grad();

  /// What this rank sends into the all-gather: 1-D, of any dtype; the caller converts.
  /// With a post-forward shard, that; else the padded shard.
  [[nodiscard]] const at::Tensor& all_gather_input() const;
  /// Takes the gathered parts [ranks, numel], of the compute dtype, into the unsharded parameter's
  /// storage, which it allocates. No version counter moves.
  void copy_out(const at::Tensor& parts_WN);

  void to_unsharded();
  void to_sharded();
  /// Keeps the `rank`-th of `world_size` equal parts of the unsharded parameter.
  void to_sharded_post_forward(int64_t world_size, int64_t rank);
  [[nodiscard]] ShardedState state() const { return state_; }

  /// Adds a fresh gradient to one that an earlier backward without sync left in the reduce dtype.
  void accumulate_unsharded_grad();
  /// Keeps the gradient for a later sync: in the reduce dtype, if that differs.
  void keep_unsharded_grad();
  /// The gradient to reduce, moved out; undefined if there is none.
  [[nodiscard]] at::Tensor take_unsharded_grad();
  [[nodiscard]] bool has_unsharded_grad() const;
  /// Zeros in the place of a gradient.
  [[nodiscard]] at::Tensor zero_unsharded_grad() const;
  /// Sets, or adds to, the sharded parameter's gradient.
  void accept_sharded_grad(const at::Tensor& grad);

 private:
  [[nodiscard]] bool is_on_flat_shard() const;
  void make_shard(const at::Tensor& full);
  void make_unsharded_storage(at::ScalarType dtype);
  [[nodiscard]] int64_t gathered_numel() const;

  std::string name_;
  ShardedTensorSpecPtr spec_;
  std::string access_error_;       // what a use of the unsharded parameter says while it is freed
  at::Tensor unsharded_param_;     // the module member's tensor
  at::Tensor gathered_;            // 1-D over the same storage, with a version counter of its own
  at::Tensor flat_shard_;          // 1-D, padded, zeros behind the rows
  at::Tensor sharded_param_;       // leaf over the leading part of flat_shard_
  at::Tensor post_forward_shard_;  // 1-D; defined in kShardedPostForward only
  at::Tensor accumulated_grad_;    // of the whole parameter, in the reduce dtype
  std::optional<at::ScalarType> reduce_dtype_;
  int64_t gathered_version_ = 0;  // of sharded_param_
  ShardedState state_ = ShardedState::kSharded;
};

}  // namespace fsdp
