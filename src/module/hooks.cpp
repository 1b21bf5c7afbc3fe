#include "module/hooks.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "module/fsdp_state.h"

namespace fsdp {
namespace {

namespace autograd = torch::autograd;

// The identity, whose backward tells the state.
class PostBackward final : public autograd::Node {
 public:
  explicit PostBackward(std::shared_ptr<FSDPState> state) : state_(std::move(state)) {}

  autograd::variable_list apply(autograd::variable_list&& grads) override {
    state_->post_backward();
    return std::move(grads);
  }
  std::string name() const override { return "fsdp::PostBackward"; }

 private:
  std::shared_ptr<FSDPState> state_;
};

}  // namespace

void add_post_backward_node(TensorRefs& inputs, const std::shared_ptr<FSDPState>& state) {
  if (!c10::GradMode::is_enabled()) return;
  autograd::edge_list edges;
  for (const at::Tensor* input : inputs) {
    if (input->requires_grad()) edges.push_back(autograd::impl::gradient_edge(*input));
  }
  if (edges.empty()) return;
  auto node = c10::make_intrusive<PostBackward>(state);
  node->set_next_edges(std::move(edges));
  for (at::Tensor* input : inputs) {
    if (!input->requires_grad()) continue;
    at::Tensor output;
    {
      const c10::NoGradGuard no_grad;
      output = input->view_as(*input);
    }
    // An in-place edit of this view could not reach the input's gradient: as in FSDP2 it is an
    // error.
    autograd::impl::get_view_autograd_meta(output)->set_creation_meta(
        autograd::CreationMeta::IN_CUSTOM_FUNCTION);
    autograd::create_gradient_edge(output, node);
    *input = std::move(output);
  }
}

void add_pre_backward_hook(const TensorRefs& outputs, const std::shared_ptr<FSDPState>& state) {
  if (!c10::GradMode::is_enabled()) return;
  for (const at::Tensor* output : outputs) {
    // A leaf (a parameter, or somebody's tensor passed through) outlives the step, and so would the
    // hook; and nothing of this module's backward comes after its gradient.
    if (!output->requires_grad() || output->is_leaf()) continue;
    output->register_hook([state](const at::Tensor&) { state->pre_backward(); });
  }
}

void cast_floating(TensorRefs& tensors, at::ScalarType dtype) {
  for (at::Tensor* tensor : tensors) {
    if (tensor->is_floating_point() && tensor->scalar_type() != dtype) *tensor = tensor->to(dtype);
  }
}

}  // namespace fsdp
