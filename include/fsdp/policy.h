#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "fsdp/device_mesh.h"

namespace fsdp {

/// The dtypes that a group computes, reduces and returns in. Unset: the parameter's own.
///
/// Sharded parameters, their gradients and the optimizer's state always keep the original dtype.
/// Source: PyTorch 2.13, torch.distributed.fsdp.MixedPrecisionPolicy.
struct MixedPrecisionPolicy {
  std::optional<at::ScalarType> param_dtype;   ///< of the all-gather, forward and backward
  std::optional<at::ScalarType> reduce_dtype;  ///< of the reduction; unset: the gradient's dtype
  std::optional<at::ScalarType> output_dtype;  ///< floating outputs of forward are cast to it
  bool cast_forward_inputs = true;  ///< floating inputs of forward are cast to param_dtype
};

/// Cut along `dim`: each rank holds one run of consecutive rows (negative: counted from the end).
struct Shard {
  int64_t dim = 0;
};

/// What becomes of a group's unsharded parameters after forward. Nothing set: `true`, but `false`
/// for the root. `true`: freed, gathered again in backward. `false`: kept until backward is done.
/// k: each rank keeps 1/k of them, and backward gathers over k ranks instead of all.
using ReshardAfterForward = std::variant<std::monostate, bool, int64_t>;

/// Where a group's bytes lie; docs/layouts.md draws it.
enum class Layout {
  /// One buffer for the group, cut into equal parts between rows of its parameters. A gather writes
  /// where the parameters are read, and copies nothing.
  kFlat,
  /// Each parameter is cut on its own (PyTorch FSDP2's layout); gathers copy in and out.
  kPerParameter,
};

/// The arguments of fully_shard().
struct FullyShardOptions {
  /// 1-D: shard over it. 2-D with named dimensions: replicate over the first, shard over the
  /// second. Unset: all ranks of the default group, on CPU.
  DeviceMeshPtr mesh;
  ReshardAfterForward reshard_after_forward;
  MixedPrecisionPolicy mp_policy;
  /// Parameters that stay as they are: neither sharded, moved nor reduced.
  std::vector<at::Tensor> ignored_params;
  /// Which dimension to cut a parameter along, given its name in the module; unset: Shard(0).
  std::function<std::optional<Shard>(const std::string& name, const at::Tensor& param)>
      shard_placement_fn;
  /// A group with a parameter that is cut along another dimension than 0 is always kPerParameter.
  Layout layout = Layout::kFlat;
  /// What if only some ranks have a gradient for a parameter, since they took different branches.
  /// false: missing ones count as zeros, and all ranks step the same. true: StateError on all
  /// ranks, at the end of backward; on a device the host waits for each reduction to know.
  bool require_equal_gradients = false;
};

}  // namespace fsdp
