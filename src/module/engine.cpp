#include "module/engine.h"

#include <torch/csrc/autograd/engine.h>

namespace fsdp {
namespace {

thread_local SavedTensorPacker* innermost_packer = nullptr;

class HookingEngine final : public torch::autograd::Engine {
 public:
  ~HookingEngine() override { stop(); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return innermost_packer == nullptr ? nullptr : innermost_packer->make_hooks();
  }
};

torch::autograd::Engine& hooking_engine() {
  static HookingEngine engine;
  return engine;
}

}  // namespace

PackScope::PackScope(SavedTensorPacker* packer) : packer_(packer), outer_(innermost_packer) {
  static const bool installed = [] {
    torch::autograd::set_default_engine_stub(&hooking_engine);
    return true;
  }();
  (void)installed;
  innermost_packer = packer;
}

PackScope::~PackScope() {
  innermost_packer = outer_;
  if (packer_ != nullptr) packer_->scope_ended();
}

}  // namespace fsdp
