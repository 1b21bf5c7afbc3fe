#pragma once

#include <limits>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace fsdp {

/// The parameters of `module` and all below it, each once: what an optimizer is to be given.
///
/// torch::nn::Module::parameters() lists a shared parameter once for each of its names, and an
/// optimizer would step it as often.
/// Source: PyTorch 2.13, torch.nn.Module.parameters (remove_duplicate).
[[nodiscard]] std::vector<at::Tensor> parameters(const torch::nn::Module& module);

struct ClipGradNormOptions {
  double norm_type = 2.0;           ///< p of the p-norm; infinity: the largest absolute value
  bool error_if_nonfinite = false;  ///< StateError instead of scaling by a norm that is inf or nan
};

/// Scales the gradients of `params` so that their total norm over all ranks is at most `max_norm`.
///
/// Takes sharded and plain parameters mixed; a plain gradient is the same on every rank and is
/// counted once, and so is a parameter that occurs twice. torch::nn::utils::clip_grad_norm_ would
/// see this rank's shards alone.
///
/// Shapes:  returns the total norm before scaling, a 0-dim tensor of float (of double if a
/// parameter is), the same on every rank;
///          0 if no parameter has a gradient.
/// Ranks:   collective over the shard group, also on a rank whose gradients are all empty.
/// Errors:  ConfigError for a norm type that is not positive, or sharded parameters of different
///          shard groups; StateError with error_if_nonfinite.
/// Source:  PyTorch 2.13, torch.nn.utils.clip_grad_norm_ over DTensor gradients.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& params, double max_norm,
                           const ClipGradNormOptions& options = {});

}  // namespace fsdp
