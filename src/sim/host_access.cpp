#include "sim/host_access.h"

#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include "base/record_inputs.h"
#include "sim/machine.h"
#include "sim/memory.h"
#include "sim/tensors.h"

namespace fsdp::sim {
namespace {

struct PinnedArgument {
  size_t index;
  at::Tensor tensor;
};

// The pinned tensors of a call on the host; none if it has to do with a device.
std::vector<PinnedArgument> pinned_arguments(c10::ArrayRef<const c10::IValue> inputs) {
  std::vector<PinnedArgument> pinned;
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::vector<at::Tensor> tensors;
    if (inputs[i].isTensor()) tensors.push_back(inputs[i].toTensor());
    if (inputs[i].isTensorList()) tensors = inputs[i].toTensorVector();
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined() || !tensor.has_storage()) continue;
      if (tensor.device().type() == kNpu) return {};
      if (tensor.is_cpu() && PinnedMemory::get().contains(tensor.storage().data())) {
        pinned.push_back({i, tensor});
      }
    }
  }
  return pinned;
}

// Whether the operator itself touches memory: it has a kernel, and what it returns is no view.
bool touches_memory(const c10::OperatorHandle& op) {
  for (const c10::Argument& result : op.schema().returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return false;
  }
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
         op.operator_name().name == "aten::copy_";
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call) {
  if (!PinnedMemory::get().is_used() || Machine::get().on_race() == OnRace::kIgnore) return nullptr;
  const std::vector<PinnedArgument> arguments = pinned_arguments(inputs_of(call));
  const auto name = arguments.empty() ? std::nullopt : call.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (!op || !touches_memory(*op)) return nullptr;
  for (const PinnedArgument& argument : arguments) {
    const c10::AliasInfo* alias = op->schema().arguments().at(argument.index).alias_info();
    std::vector<Bytes> bytes;
    add_bytes(bytes, argument.tensor, alias != nullptr && alias->isWrite());
    for (const Bytes& range : bytes) Machine::get().note_host(call.name(), range);
  }
  return nullptr;
}

}  // namespace

void follow_host_accesses() {
  static std::once_flag once;
  std::call_once(once, [] {
    at::addGlobalCallback(at::RecordFunctionCallback(&before_operator)
                              .needsInputs(true)
                              .scopes({at::RecordScope::FUNCTION}));
  });
}

}  // namespace fsdp::sim
