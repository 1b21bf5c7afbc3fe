#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shard/flat_param.h"
#include "shard/sharded_spec.h"

namespace fsdp {

/// One parameter, by its two handles.
///
/// The *unsharded parameter* is the tensor that the module's member holds; its identity never
/// changes, its storage is freed while sharded. The *sharded parameter* takes its place in the
/// module's dictionary, for optimizers. Nothing is exchanged when the state changes.
class FSDPParam {
 public:
  /// Copies this rank's rows of `param` into the shard of `flat`, which outlives this. `param` is
  /// to be given a storage with init_unsharded_param().
  FSDPParam(at::Tensor param, std::string name, ShardedTensorSpecPtr spec, FlatParam& flat);

  [[nodiscard]] const at::Tensor& sharded_param() const { return sharded_param_; }
  [[nodiscard]] const at::Tensor& unsharded_param() const { return unsharded_param_; }
  [[nodiscard]] const ShardedTensorSpecPtr& spec() const { return spec_; }
  [[nodiscard]] FlatParam& flat() const { return *flat_; }
  [[nodiscard]] const std::string& name() const { return name_; }  ///< in the sharded module
  /// The element of the flat shard at which the sharded parameter begins.
  [[nodiscard]] int64_t shard_offset() const { return shard_offset_; }
  void set_fqn(const std::string& fqn);

  /// Makes the unsharded parameter a part of its flat parameter's unsharded tensor, if it is not.
  void init_unsharded_param();

  /// Whether the sharded parameter is where it belongs: torch::load, to() and set_data() move it
  /// off.
  [[nodiscard]] bool is_on_flat_shard() const;
  /// Throws StateError if the sharded parameter's shape has changed.
  void check_local_shape() const;
  /// Copies the sharded parameter's values into the flat shard, and makes it a part of it again.
  void move_to_flat_shard();

  /// Whether the sharded parameter was written to, or moved, since the last gather began.
  [[nodiscard]] bool changed_since_gather() const;
  void note_gather() { gathered_version_ = sharded_param_._version(); }
  /// Freezing and unfreezing is done on the sharded parameter; takes it over.
  void sync_requires_grad();

  /// The unsharded parameter has been gathered: it requires grad as the sharded one does, and
  /// gradients may come.
  void to_unsharded();
  /// Throws StateError, once, if the unsharded parameter was written to, or given other data, since
  /// then: the write would be lost with its bytes.
  void check_not_written();
  /// Throws StateError, once, if its shape, strides or storage were changed while it was sharded.
  void check_in_place();

  /// While no backward runs, an optimizer that holds the unsharded parameter shall not find it
  /// without a gradient, and so skip it in silence: it gets one whose use throws.
  void refuse_optimizers();
  void admit_gradients();

  /// Takes the gathered parts [ranks, numel], of the compute dtype, into the unsharded tensor.
  /// No version counter moves.
  void copy_out(const at::Tensor& parts_WN) const;

  // Gradients of Layout::kPerParameter stay with the parameter until they are reduced. -----------
  /// Adds a fresh gradient to one that an earlier backward without sync left in the reduce dtype.
  void accumulate_unsharded_grad();
  /// Keeps the gradient for a later sync, in `dtype`.
  void keep_unsharded_grad(at::ScalarType dtype);
  /// The gradient to reduce, moved out; undefined if there is none.
  [[nodiscard]] at::Tensor take_unsharded_grad();
  [[nodiscard]] bool has_unsharded_grad() const;

  /// Sets, or adds to, the sharded parameter's gradient: the elements from `offset` on of `grads`,
  /// which is contiguous.
  void accept_sharded_grad(const at::Tensor& grads, int64_t offset);

 private:
  [[nodiscard]] at::Tensor part_of_flat_shard() const;
  [[nodiscard]] bool is_on_flat_unsharded() const;
  void note_unsharded() { unsharded_version_ = unsharded_param_._version(); }

  std::string name_;
  ShardedTensorSpecPtr spec_;
  c10::intrusive_ptr<c10::BackendMeta> label_;  // of spec_
  std::vector<int64_t> local_sizes_;
  FlatParam* flat_;
  int64_t shard_offset_;
  at::Tensor unsharded_param_;     // the module member's tensor
  at::Tensor sharded_param_;       // leaf over a part of the flat shard
  at::Tensor accumulated_grad_;    // of the whole parameter, in the reduce dtype
  at::Tensor refused_grad_;        // a gradient without bytes, with our message
  int64_t gathered_version_ = 0;   // of sharded_param_
  int64_t unsharded_version_ = 0;  // of unsharded_param_
};

}  // namespace fsdp
