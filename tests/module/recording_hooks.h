#pragma once

#include <cstddef>
#include <memory>
#include <ostream>
#include <utility>
#include <vector>

#include "fsdp/fsdp_module.h"

namespace fsdp::testing {

/// What hooks were told since they were asked last.
struct HookEvents {
  int num_pre = 0;
  int num_post = 0;
  int num_threw = 0;
  size_t num_inputs = 0;   ///< tensors in the arguments of all calls
  size_t num_outputs = 0;  ///< tensors in the results of all calls

  bool operator==(const HookEvents&) const = default;
};

inline std::ostream& operator<<(std::ostream& stream, const HookEvents& events) {
  return stream << "{pre " << events.num_pre << ", post " << events.num_post << ", threw "
                << events.num_threw << ", inputs " << events.num_inputs << ", outputs "
                << events.num_outputs << "}";
}

/// `num_calls` that ended well, each with so many tensors.
inline HookEvents calls(int num_calls, size_t inputs_each, size_t outputs_each) {
  return {num_calls, num_calls, 0, num_calls * inputs_each, num_calls * outputs_each};
}

/// Counts what it is told, and multiplies tensors, so that values show whether they were replaced.
class RecordingHooks : public ForwardHooks {
 public:
  double input_factor = 1;
  double output_factor = 1;
  std::vector<torch::nn::Module*> modules;  ///< one entry for each pre_forward

  /// What happened since the last take().
  HookEvents take() { return std::exchange(events_, {}); }

  void pre_forward(torch::nn::Module& module, TensorRefs& inputs) override {
    ++events_.num_pre;
    events_.num_inputs += inputs.size();
    modules.push_back(&module);
    multiply(inputs, input_factor);
  }
  void post_forward(torch::nn::Module&, TensorRefs& outputs) override {
    ++events_.num_post;
    events_.num_outputs += outputs.size();
    multiply(outputs, output_factor);
  }
  void forward_threw(torch::nn::Module&) noexcept override { ++events_.num_threw; }

 private:
  static void multiply(TensorRefs& tensors, double factor) {
    if (factor == 1) return;
    for (at::Tensor* tensor : tensors) {
      if (tensor->is_floating_point()) *tensor = *tensor * factor;
    }
  }

  HookEvents events_;
};

/// Sets new recording hooks on `block`.
template <class Holder>
std::shared_ptr<RecordingHooks> record(Holder& block) {
  auto hooks = std::make_shared<RecordingHooks>();
  block->set_forward_hooks(hooks);
  return hooks;
}

}  // namespace fsdp::testing
