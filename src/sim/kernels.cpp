#include "sim/kernels.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "sim/generator.h"
#include "sim/machine.h"
#include "sim/memory.h"
#include "sim/tensors.h"

namespace fsdp::sim {
namespace {

using at::Tensor;
using torch::jit::Stack;

// An argument that is a tensor of an npu, and the host's view of it.
struct TensorArgument {
  Tensor npu;
  Tensor host;
  bool is_write = false;
};

bool is_write(const c10::Argument& argument) {
  const c10::AliasInfo* alias = argument.alias_info();
  if (alias == nullptr) return false;
  const auto& inner = alias->containedTypes();
  return alias->isWrite() ||
         std::any_of(inner.begin(), inner.end(), [](const auto& type) { return type.isWrite(); });
}

// Copies `value` with each tensor replaced by what `replace` makes of it.
template <typename Replace>
c10::IValue map_tensors(const c10::IValue& value, Replace&& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(replace(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<Tensor>(replace(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// Operators whose shape function tells another shape than the kernel's.
bool has_false_shape(const c10::FunctionSchema& schema) {
  static const std::set<std::pair<std::string, std::string>> operators = {
      {"aten::_stack", "out"},         {"aten::isin", "Scalar_Tensor"},
      {"aten::mse_loss", "out"},       {"aten::isin", "Scalar_Tensor_out"},
      {"aten::smooth_l1_loss", "out"}, {"aten::range", "out_"},
  };
  return operators.count({schema.name(), schema.overload_name()}) > 0;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {
    const size_t num_arguments = schema_.arguments().size();
    arguments_ = torch::jit::pop(*stack, num_arguments);
    for (size_t i = 0; i < num_arguments; ++i) read_argument(i);
    if (!device_) device_ = c10::Device(kNpu, Machine::get().host().device);
    stream_ = &stream_of(*device_);
  }

  void run() {
    const c10::DeviceGuard on_device(*device_);
    if (returns_view()) {
      return_results(run_on_host(op_, host_arguments_));
      return;
    }
    if (Machine::get().is_late(*stream_) && run_late()) return;
    // A kernel whose result's shape only the values tell, or that draws random numbers, waits for
    // what its stream has before it.
    Machine::get().run_queued(*stream_);
    run_now();
  }

 private:
  void read_argument(size_t i) {
    const bool writes = is_write(schema_.arguments()[i]);
    c10::IValue& value = arguments_[i];
    if (value.isDevice()) {
      if (value.toDevice().type() == kNpu && !device_) device_ = value.toDevice();
      host_arguments_.emplace_back(c10::Device(c10::kCPU));
      return;
    }
    if (value.isGenerator() && value.toGenerator().device().type() == kNpu) {
      host_arguments_.emplace_back(NpuGenerator::host_generator(value.toGenerator()));
      return;
    }
    host_arguments_.push_back(map_tensors(value, [&](const Tensor& tensor) {
      if (!is_npu(tensor)) return tensor;
      if (!device_) device_ = tensor.device();
      tensors_.push_back({tensor, host_alias(tensor), writes});
      return tensors_.back().host;
    }));
  }

  [[nodiscard]] std::vector<Bytes> accesses() const {
    std::vector<Bytes> bytes;
    for (const TensorArgument& tensor : tensors_) add_bytes(bytes, tensor.npu, tensor.is_write);
    return bytes;
  }

  // A random operator that was given no generator draws from the device's.
  void set_default_generator() {
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) return;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (schema_.arguments()[i].name() == "generator" && arguments_[i].isNone()) {
        host_arguments_[i] =
            NpuGenerator::host_generator(NpuGenerator::default_of(device_->index()));
      }
    }
  }

  void run_now() {
    set_default_generator();
    Machine& machine = Machine::get();
    Stack results;
    machine.launch(*stream_, schema_.name(), accesses(),
                   [&] { results = run_on_host(op_, host_arguments_); });
    machine.run_queued(*stream_);
    return_results(results);
    // out= may have been given other memory.
    for (const TensorArgument& tensor : tensors_) {
      if (tensor.is_write) adopt_resized(tensor);
    }
  }

  // A view needs no kernel: nothing is read or written.
  [[nodiscard]] bool returns_view() const {
    const auto& returns = schema_.returns();
    return std::any_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
      return result.alias_info() != nullptr && !is_write(result);
    });
  }

  void return_results(const Stack& results) {
    for (const c10::IValue& result : results) {
      stack_->push_back(map_tensors(result, [&](const Tensor& host) { return to_npu(host); }));
    }
  }

  static Stack run_on_host(const c10::OperatorHandle& op, Stack stack) {
    const KernelMode mode;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return stack;
  }

  // The npu's tensor for a result on the host: an argument, a view of one, or a new one.
  Tensor to_npu(const Tensor& host) {
    if (!host.defined()) return host;
    for (const TensorArgument& tensor : tensors_) {
      if (tensor.host.is_same(host)) return tensor.npu;
    }
    for (const TensorArgument& tensor : tensors_) {
      if (host.has_storage() && host.nbytes() > 0 &&
          host.storage().data() == tensor.host.storage().data()) {
        return view_of(tensor.npu, host.sizes(), host.strides(), host.storage_offset(),
                       host.dtype());
      }
    }
    const Tensor npu = empty_like(host);
    write(npu, host);
    return npu;
  }

  [[nodiscard]] Tensor empty_like(const Tensor& host) const {
    const bool dense = host.is_non_overlapping_and_dense();
    const std::vector<int64_t> strides =
        dense ? host.strides().vec() : at::detail::defaultStrides(host.sizes());
    return at::detail::empty_strided_generic(host.sizes(), strides, &DeviceMemory::get(),
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             host.scalar_type());
  }

  void write(const Tensor& npu, const Tensor& host) const {
    std::vector<Bytes> bytes;
    add_bytes(bytes, npu, /*is_write=*/true);
    const Tensor alias = host_alias(npu);
    Machine::get().launch(*stream_, schema_.name(), bytes, [alias, host] {
      const KernelMode mode;
      alias.copy_(host);
    });
    Machine::get().run_queued(*stream_);
  }

  void adopt_resized(const TensorArgument& tensor) {
    const bool moved = tensor.host.storage().data() != tensor.npu.storage().data();
    if (!moved && tensor.host.sizes() == tensor.npu.sizes()) return;
    tensor.npu.resize_(tensor.host.sizes());
    if (moved && tensor.host.numel() > 0) write(tensor.npu, tensor.host);
  }

  // Puts the call on its stream, to run when somebody waits. False if that cannot be, with nothing
  // done: what it returns is not known without running it.
  bool run_late() {
    if (op_.hasTag(at::Tag::nondeterministic_seeded) || has_false_shape(schema_)) return false;
    const auto& returns = schema_.returns();
    const bool returns_arguments =
        std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
          return result.alias_info() != nullptr && result.alias_info()->isWrite();
        });
    const bool has_out =
        std::any_of(schema_.arguments().begin(), schema_.arguments().end(),
                    [](const c10::Argument& argument) { return argument.is_out(); });
    if (returns_arguments && !has_out) {
      launch_late({});
      for (const c10::IValue& result : arguments_returned()) stack_->push_back(result);
      return true;
    }
    return run_late_by_shape();
  }

  // What an in-place operator returns.
  [[nodiscard]] std::vector<c10::IValue> arguments_returned() const {
    std::vector<c10::IValue> results;
    for (size_t i = 0; i < schema_.arguments().size() && results.size() < schema_.returns().size();
         ++i) {
      if (is_write(schema_.arguments()[i])) results.push_back(arguments_[i]);
    }
    return results;
  }

  bool run_late_by_shape() {
    std::vector<std::pair<Tensor, Tensor>> shapes;  // of npu tensors
    Stack stack;
    for (const c10::IValue& argument : arguments_) {
      if (argument.isDevice()) {
        stack.emplace_back(c10::Device(c10::kMeta));
        continue;
      }
      stack.push_back(map_tensors(argument, [&](const Tensor& tensor) {
        if (!tensor.defined() || (!is_npu(tensor) && tensor.dim() == 0)) return tensor;
        Tensor shape =
            at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
        shapes.emplace_back(tensor, shape);
        return shape;
      }));
    }
    try {
      const KernelMode mode;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const std::exception&) {
      return false;  // no shape function, or an error that the kernel will tell better
    }
    for (const auto& [tensor, shape] : shapes) {
      if (is_npu(tensor) && tensor.sizes() != shape.sizes()) tensor.resize_(shape.sizes());
    }
    if (!shapes.empty()) refresh_aliases();
    if (may_differ_in_type(stack)) take_kernel_types(&stack);
    std::vector<Tensor> outputs;  // by the order of tensors in the results; undefined: an argument
    std::vector<c10::IValue> results;
    for (const c10::IValue& result : stack) {
      results.push_back(map_tensors(result, [&](const Tensor& shape) -> Tensor {
        if (!shape.defined()) return shape;
        for (const auto& [tensor, known] : shapes) {
          if (known.is_same(shape)) {
            outputs.emplace_back();
            return tensor;
          }
        }
        outputs.push_back(empty_like(shape));
        return outputs.back();
      }));
    }
    launch_late(outputs);
    for (c10::IValue& result : results) stack_->push_back(std::move(result));
    return true;
  }

  // Of layer norm in bf16 the CPU's kernel returns statistics in bf16, the shape function in fp32.
  [[nodiscard]] bool may_differ_in_type(const Stack& shapes) const {
    const bool is_reduced =
        std::any_of(tensors_.begin(), tensors_.end(), [](const TensorArgument& tensor) {
          return tensor.npu.defined() && at::isReducedFloatingType(tensor.npu.scalar_type());
        });
    bool has_float = false;
    for (const c10::IValue& result : shapes) {
      map_tensors(result, [&](const Tensor& shape) {
        has_float = has_float || (shape.defined() && shape.scalar_type() == at::kFloat);
        return shape;
      });
    }
    return is_reduced && has_float;
  }

  // Gives shapes the types of what the kernel makes of zeros.
  void take_kernel_types(Stack* shapes) const {
    Stack zeros;
    for (const c10::IValue& argument : host_arguments_) {
      zeros.push_back(map_tensors(argument, [](const Tensor& tensor) {
        return tensor.defined() ? at::zeros(tensor.sizes(), tensor.options()) : tensor;
      }));
    }
    std::vector<at::ScalarType> types;
    for (const c10::IValue& result : run_on_host(op_, std::move(zeros))) {
      map_tensors(result, [&](const Tensor& host) {
        if (host.defined()) types.push_back(host.scalar_type());
        return host;
      });
    }
    size_t i = 0;
    for (c10::IValue& result : *shapes) {
      result = map_tensors(result, [&](const Tensor& shape) {
        if (!shape.defined()) return shape;
        const at::ScalarType type = types.at(i++);
        return type == shape.scalar_type() ? shape : shape.to(type);
      });
    }
  }

  void refresh_aliases() {
    tensors_.clear();
    host_arguments_.clear();
    for (size_t i = 0; i < arguments_.size(); ++i) read_argument(i);
  }

  // The host may write its tensors before this runs; so they are copied. (Tensors that Python knows
  // may also not be let go of while the machine runs: that takes Python's lock.)
  [[nodiscard]] Stack arguments_for_later() const {
    Stack arguments;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const bool writes = is_write(schema_.arguments()[i]);
      bool has_host_tensor = false;
      (void)map_tensors(arguments_[i], [&](const Tensor& tensor) {
        has_host_tensor |= tensor.defined() && !is_npu(tensor) && !writes;
        return tensor;
      });
      if (!has_host_tensor) {
        arguments.push_back(host_arguments_[i]);
        continue;
      }
      arguments.push_back(map_tensors(host_arguments_[i], [&](const Tensor& tensor) {
        const bool is_alias = std::any_of(tensors_.begin(), tensors_.end(), [&](const auto& known) {
          return known.host.is_same(tensor);
        });
        return !tensor.defined() || is_alias ? tensor : tensor.detach().clone();
      }));
    }
    return arguments;
  }

  void launch_late(const std::vector<Tensor>& outputs) {
    std::vector<Bytes> bytes = accesses();
    std::vector<Tensor> aliases;
    for (const Tensor& output : outputs) {
      if (output.defined()) add_bytes(bytes, output, /*is_write=*/true);
      aliases.push_back(output.defined() ? host_alias(output) : Tensor());
    }
    Machine::get().launch(
        *stream_, schema_.name(), bytes,
        [op = op_, arguments = arguments_for_later(), aliases = std::move(aliases)] {
          const Stack results = run_on_host(op, arguments);
          if (aliases.empty()) return;
          const KernelMode mode;
          size_t i = 0;
          for (const c10::IValue& result : results) {
            map_tensors(result, [&](const Tensor& host) {
              if (!host.defined()) return host;
              const Tensor& alias = aliases.at(i++);
              if (alias.defined()) alias.copy_(host);
              return host;
            });
          }
        });
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* const stack_;
  Stack arguments_;
  Stack host_arguments_;
  std::vector<TensorArgument> tensors_;
  std::optional<c10::Device> device_;
  StreamState* stream_ = nullptr;
};

void run_kernel(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// What ATen calls where it knows no convolution for a device.
void run_convolution(const c10::OperatorHandle&, Stack* stack) {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  Call(op, stack).run();
}

void run_convolution_backward(const c10::OperatorHandle& overrideable, Stack* stack) {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  // The CPU's also wants the sizes of the bias.
  Stack arguments = torch::jit::pop(*stack, overrideable.schema().arguments().size());
  const Tensor weight = arguments.at(2).toTensor();
  const bool is_transposed = arguments.at(6).toBool();
  const int64_t num_channels =
      is_transposed ? weight.size(1) * arguments.at(8).toInt() : weight.size(0);
  arguments.insert(arguments.begin() + 3, c10::IValue(std::vector<int64_t>{num_channels}));
  for (c10::IValue& argument : arguments) stack->push_back(std::move(argument));
  Call(op, stack).run();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&run_convolution>());
  library.impl("convolution_backward_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&run_convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}

}  // namespace

// The fallback alone is not enough: an operator that is also written in terms of others (layer
// norm) would be taken apart, with other roundings than the CPU's kernel has.
void use_cpu_kernels() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten",
                                            c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name :
       dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    const auto op = dispatcher.findOp(name);
    if (!op || name.name.rfind("aten::", 0) != 0 ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    const std::string full =
        name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
  }
}

}  // namespace fsdp::sim
