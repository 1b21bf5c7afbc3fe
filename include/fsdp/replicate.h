#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "fsdp/process_group.h"

namespace torch::nn {
class Module;
}

namespace fsdp {

class ReplicateState;

/// The arguments of replicate().
struct ReplicateOptions {
  ProcessGroupPtr process_group;  ///< unset: the default group
  /// Gradients are all-reduced in buckets of at most this many MiB (of one parameter, if that is
  /// larger), each as soon as backward has filled it. The first one is smaller: it starts early.
  double bucket_cap_mb = 25;
  double first_bucket_cap_mb = 1;
  /// Forward may leave parameters out, other ones in each step and on each rank. Costs a walk
  /// through the graph in each step, and an all-reduce of which parameters were used.
  bool find_unused_parameters = false;
  /// Each step uses the same parameters, as often. Also finds unused ones, in the first backward.
  bool static_graph = false;
  /// Gradients lie in the buckets, and are not copied out of them.
  bool gradient_as_bucket_view = true;
  /// Parameters and buffers start with the values of rank 0. false: they are equal already.
  bool init_sync = true;
  /// Buffers get rank 0's values before each forward that follows one with gradient sync.
  bool broadcast_buffers = true;
  /// Parameters that stay as they are: neither broadcast nor reduced.
  std::vector<at::Tensor> ignored_params;
};

/// Makes backward average the gradients of `module` over the ranks, as DistributedDataParallel
/// does, with c10d's own Reducer: all-reduces run while backward goes on.
///
/// Modules below it that are sharded (fully_shard) or replicated already keep to themselves, with
/// all that lies below them. Each backward needs a forward of `module` before it. A parameter that
/// requires no gradient when replicate() is called is never reduced. Freeze before, not after.
///
/// Memory:  buckets of the size of all gradients; with gradient_as_bucket_view these are the
///          gradients, except while backward copies one into its bucket.
/// Ranks:   collective over the group, here if init_sync, and in each step; every rank makes the
///          same calls in the same order. Ranks are the same model, which is checked.
/// Errors:  ConfigError if `module` runs no hooks (its type was not declared with FSDP_MODULE), is
///          sharded or replicated already, has no parameter left to reduce, or a cap is not
///          positive; then `module` is as it was. StateError if another rank's parameters differ in
///          name, shape, dtype or requires_grad, and by the next forward if a backward left
///          parameters without a gradient but neither find_unused_parameters nor static_graph is
///          set.
/// Source:  PyTorch 2.13, torch.distributed._composable.replicate,
///          torch.nn.parallel.DistributedDataParallel.
void replicate(torch::nn::Module& module, const ReplicateOptions& options = {});

/// Whether replicate() was called on this very module.
[[nodiscard]] bool is_replicated(const torch::nn::Module& module);

/// While it is alive, forwards of the replicated modules in the tree of `module` leave their
/// backward's gradients on this rank, unreduced. The first backward of a forward after it averages
/// the sums.
///
///     for (...) { const fsdp::NoSync no_sync(*model); loss_of(model, part).backward(); }
///     loss_of(model, last_part).backward();
///
/// Errors:  StateError if none of the modules is replicated.
/// Source:  PyTorch 2.13, torch.nn.parallel.DistributedDataParallel.no_sync.
class NoSync {
 public:
  explicit NoSync(torch::nn::Module& module);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::vector<std::shared_ptr<ReplicateState>> states_;  // those that it switched off
};

}  // namespace fsdp
