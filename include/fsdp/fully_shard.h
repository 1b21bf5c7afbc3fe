#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "fsdp/fsdp_module.h"
#include "fsdp/policy.h"

namespace fsdp {

/// Shards the parameters of `module` over `options.mesh`, in place, and hooks forward and backward.
///
/// One call makes one communication group: one all-gather and one reduce-scatter a step. A
/// parameter joins the first call that reaches it, so call bottom-up: blocks first, model last.
/// Afterwards parameters() gives the sharded parameters, for the optimizer; the module's own
/// tensors (`linear->weight`) are the unsharded ones, and throw while they are sharded.
///
/// Shapes:  [d0, ...]: each rank keeps ceil(d0 / N) consecutive rows, the last ones fewer or none.
/// Memory:  1/N of the parameter bytes stay, plus padding; full parameters are freed on return.
/// Ranks:   no communication unless reshard_after_forward is an integer (makes groups); every rank
///          makes the same calls in the same order. Ranks must start with equal parameters.
/// Errors:  ConfigError if `module` runs no hooks (its type was not declared with FSDP_MODULE), was
///          sharded before, lies below one that was, shares a parameter with another group, or a
///          parameter is 0-dim, not contiguous, cannot be cut, or is held by no member of its
///          module; then `module` is as it was.
/// Source:  PyTorch 2.13, torch.distributed.fsdp.fully_shard.
FSDPModule& fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});

/// Shards several modules together: one group, gathered before the first of them runs and freed
/// after the last: `fully_shard({*norm, *output})`. Else as above.
///
/// A module of the list that did not run in a forward of the root counts as having run when the
/// root ends. Modules below others of the list are theirs. Errors:  also ConfigError for an empty
/// list or a module that occurs twice; the first forward throws
///          StateError if no parent of the modules was sharded, or it is not what runs first.
void fully_shard(const std::vector<std::reference_wrapper<torch::nn::Module>>& modules,
                 const FullyShardOptions& options = {});

/// Makes `b`, a parameter of `module_b`, the same parameter as `a` of `module_a`: the member and
/// the dictionary entry both. Assigning the member alone would leave two parameters.
///
/// Write `fsdp::tie(...)`: with the bare name C++ finds std::tie, which does nothing.
/// `fsdp::tie(*embed, embed->weight, *output, output->weight);`
/// Errors:  ConfigError if either is not a parameter of its module, was sharded already, or shape,
///          dtype or device differ.
void tie(torch::nn::Module& module_a, const at::Tensor& a, torch::nn::Module& module_b,
         at::Tensor& b);

}  // namespace fsdp
