#pragma once

#include <functional>
#include <memory>

#include "fsdp/fsdp_module.h"

namespace fsdp {

/// Puts one autograd node behind all inputs that require grad. When their gradients have arrived
/// (and so, the engine's order says, those of the module's parameters) it calls post_backward().
///
/// The new inputs are views of their originals that autograd refuses to edit in place. Does nothing
/// without grad mode or without such inputs.
void add_post_backward_node(TensorRefs& inputs, const std::shared_ptr<FSDPState>& state);

/// Calls pre_backward() when the gradient of any of these outputs arrives.
void add_pre_backward_hook(const TensorRefs& outputs, const std::shared_ptr<FSDPState>& state);

/// Casts the floating tensors among them; autograd casts the gradients back.
void cast_floating(TensorRefs& tensors, at::ScalarType dtype);

}  // namespace fsdp
