#include "sim/kernels.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "sim/generator.h"
#include "sim/machine.h"
#include "sim/memory.h"

namespace fsdp::sim {
namespace {

using at::Tensor;
using torch::jit::Stack;

// More rows than this count as one range from the first to the last: checking each would take
// longer than the kernel.
constexpr int64_t kMaxRanges = 1 << 14;

bool is_npu(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kNpu; }

StreamState& stream_of(const c10::Device& device) {
  return Machine::get().current_stream(device.index());
}

Tensor view_of(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides,
               int64_t offset) {
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

// Kernels run as below autograd, whatever the thread that happens to run them is doing.
class KernelMode {
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  at::DisableRecordFunctionGuard not_recorded_;  // the call was
};

// ---- one call of an operator -------------------------------------------------------------------

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
    machine.launch(*stream_, schema_.name(), accesses(), [&] { results = run_on_host(op_, host_arguments_); });
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
        return view_of(tensor.npu, host.sizes(), host.strides(), host.storage_offset());
      }
    }
    const Tensor npu = empty_like(host);
    write(npu, host);
    return npu;
  }

  [[nodiscard]] Tensor empty_like(const Tensor& host) const {
    const bool dense = host.is_non_overlapping_and_dense();
    const std::vector<int64_t> strides =
        dense ? host.strides().vec()
              : at::detail::defaultStrides(host.sizes());
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
    if (op_.hasTag(at::Tag::nondeterministic_seeded)) return false;
    const auto& returns = schema_.returns();
    const bool returns_arguments =
        std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
          return result.alias_info() != nullptr && result.alias_info()->isWrite();
        });
    const bool has_out = std::any_of(schema_.arguments().begin(), schema_.arguments().end(),
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
        Tensor shape = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(),
                                                      tensor.scalar_type());
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

  void refresh_aliases() {
    tensors_.clear();
    host_arguments_.clear();
    for (size_t i = 0; i < arguments_.size(); ++i) read_argument(i);
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
        [op = op_, arguments = host_arguments_, aliases = std::move(aliases)] {
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

// ---- operators without a kernel of the CPU's ---------------------------------------------------

Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> layout, std::optional<at::Device> device,
             std::optional<bool> pin_memory, std::optional<at::MemoryFormat> memory_format) {
  const c10::OptionalDeviceGuard on_device(device);
  return at::detail::empty_generic(sizes, &DeviceMemory::get(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), memory_format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                     std::optional<at::Device> device, std::optional<bool> pin_memory) {
  const c10::OptionalDeviceGuard on_device(device);
  return at::detail::empty_strided_generic(sizes, strides, &DeviceMemory::get(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                  std::optional<int64_t> offset) {
  return view_of(tensor, sizes, strides, offset.value_or(tensor.storage_offset()));
}

Tensor view(const Tensor& tensor, c10::IntArrayRef sizes) {
  const auto inferred = at::infer_size_dv(sizes, tensor.numel());
  const auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), inferred);
  TORCH_CHECK(strides.has_value(),
              "view size is not compatible with input tensor's size and stride (at least one "
              "dimension spans across two contiguous subspaces). Use .reshape(...) instead.");
  return view_of(tensor, inferred, *strides, tensor.storage_offset());
}

Tensor reshape_alias(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return view_of(tensor, sizes, strides, tensor.storage_offset());
}

Tensor unfold(const Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
  const int64_t d = at::maybe_wrap_dim(dim, tensor.dim(), /*wrap_scalar=*/true);
  auto sizes = tensor.sizes().vec();
  auto strides = tensor.strides().vec();
  TORCH_CHECK(tensor.dim() > 0 && step > 0 && size <= sizes[d], "unfold: size ", size,
              " and step ", step, " do not fit dimension ", d, " of ", tensor.sizes());
  sizes.push_back(size);
  strides.push_back(strides[d]);
  sizes[d] = (sizes[d] - size) / step + 1;
  strides[d] *= step;
  return view_of(tensor, sizes, strides, tensor.storage_offset());
}

const Tensor& resize(const Tensor& tensor, c10::IntArrayRef sizes,
                     std::optional<at::MemoryFormat> memory_format) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->generic_set_sizes_contiguous(sizes);
  if (memory_format) impl->empty_tensor_restride(*memory_format);
  const size_t num_bytes =
      (static_cast<size_t>(tensor.storage_offset()) + static_cast<size_t>(tensor.numel())) *
      tensor.element_size();
  if (num_bytes > tensor.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), num_bytes);
  }
  return tensor;
}

Tensor& set_source(Tensor& tensor, c10::Storage source, int64_t offset, c10::IntArrayRef sizes,
                   c10::IntArrayRef strides) {
  TORCH_CHECK(source.device().type() == kNpu, "set_: a tensor of an npu cannot have a storage of ",
              source.device());
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (strides.empty()) {
    impl->set_storage_offset(offset);
    impl->generic_set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  return tensor;
}

Tensor& set_storage(Tensor& tensor, c10::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / tensor.element_size());
  return set_source(tensor, std::move(source), 0, {numel}, {});
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_source(tensor, source.storage(), source.storage_offset(), source.sizes(),
                    source.strides());
}

Tensor& set_nothing(Tensor& tensor) {
  const c10::DeviceGuard on_device(tensor.device());
  return set_source(tensor,
                    c10::Storage(c10::Storage::use_byte_size_t(), 0, &DeviceMemory::get(), true), 0,
                    {0}, {});
}

void copy_on_device(const Tensor& source, const Tensor& target) {
  Machine& machine = Machine::get();
  StreamState& stream = stream_of(source.device());
  StreamState& target_stream = stream_of(target.device());
  machine.wait(stream, target_stream);  // between devices both streams meet
  std::vector<Bytes> bytes;
  add_bytes(bytes, source, /*is_write=*/false);
  add_bytes(bytes, target, /*is_write=*/true);
  machine.launch(stream, "copy", bytes, [from = host_alias(source), to = host_alias(target)] {
    const KernelMode mode;
    to.copy_(from);
  });
  machine.wait(target_stream, stream);
}

// Pageable memory is read at the call, pinned memory when the copy runs. As with CUDA, a copy that may
// block waits for the stream whatever the memory is.
void copy_to_device(const Tensor& source, const Tensor& target, bool non_blocking) {
  Machine& machine = Machine::get();
  StreamState& stream = stream_of(target.device());
  const bool pinned = PinnedMemory::get().contains(source.storage().data());
  std::vector<Bytes> bytes;
  if (pinned) add_bytes(bytes, source, /*is_write=*/false);
  add_bytes(bytes, target, /*is_write=*/true);
  const bool is_now = machine.execution() == Execution::kEager;
  const Tensor from = pinned || is_now ? source.detach() : source.detach().clone();
  machine.launch(stream, "copy to device", bytes, [from, to = host_alias(target)] {
    const KernelMode mode;
    to.copy_(from);
  });
  if (!non_blocking) machine.synchronize(stream);
}

// Only a copy to pinned memory lets the host go on.
void copy_to_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  Machine& machine = Machine::get();
  StreamState& stream = stream_of(source.device());
  const bool pinned = PinnedMemory::get().contains(target.storage().data());
  std::vector<Bytes> bytes;
  add_bytes(bytes, source, /*is_write=*/false);
  if (pinned) add_bytes(bytes, target, /*is_write=*/true);
  machine.launch(stream, "copy to host", bytes, [from = host_alias(source), to = target.detach()] {
    const KernelMode mode;
    to.copy_(from);
  });
  if (!pinned || !non_blocking) machine.synchronize(stream);
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  const Tensor from = source.sizes() == target.sizes() ? source : source.expand_as(target);
  if (is_npu(from) && is_npu(target)) {
    copy_on_device(from, target);
  } else if (is_npu(target)) {
    copy_to_device(from, target, non_blocking);
  } else {
    copy_to_host(from, target, non_blocking);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, /*non_blocking=*/false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  Tensor host = at::empty(tensor.sizes(), tensor.options().device(c10::kCPU));
  copy_to_host(tensor, host, /*non_blocking=*/false);
  return host.item();
}

bool equal(const Tensor& a, const Tensor& b) { return at::equal(a.cpu(), b.cpu()); }

void record_stream(Tensor& tensor, c10::Stream stream) {
  DeviceMemory::get().record_stream(tensor.storage().data(), Machine::get().stream(stream));
}

bool can_shallow_copy(const Tensor& tensor, const Tensor& other) { return true; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &unfold);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_source);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("equal", &equal);
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &can_shallow_copy);
}

}  // namespace

// The fallback alone is not enough: an operator that is also written in terms of others (layer norm)
// would be taken apart, with other roundings than the CPU's kernel has.
void use_cpu_kernels() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                            __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name :
       dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    const auto op = dispatcher.findOp(name);
    const bool composite =
        op && (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
               op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
               op->hasKernelForDispatchKey(
                   c10::DispatchKey::CompositeExplicitAutogradNonFunctional));
    if (!composite || name.name.rfind("aten::", 0) != 0 ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    const std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
  }
}

void add_bytes(std::vector<Bytes>& bytes, const Tensor& tensor, bool is_write) {
  if (tensor.numel() == 0) return;
  const auto element = static_cast<int64_t>(tensor.element_size());
  // Dimensions from the longest stride to the shortest; those that lie dense become one run.
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size; in elements
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != 0) {
      dims.emplace_back(tensor.stride(d), tensor.size(d));
    }
  }
  std::sort(dims.begin(), dims.end(), std::greater<>());
  int64_t run = 1;
  while (!dims.empty() && dims.back().first == run) {
    run *= dims.back().second;
    dims.pop_back();
  }
  int64_t num_runs = 1, extent = run;
  for (const auto& [stride, size] : dims) {
    num_runs *= size;
    extent += stride * (size - 1);
  }
  const auto base = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const auto add = [&](int64_t offset, int64_t numel) {
    const uintptr_t begin = base + static_cast<uintptr_t>(offset * element);
    bytes.push_back({begin, begin + static_cast<uintptr_t>(numel * element), is_write});
  };
  if (num_runs > kMaxRanges) {
    add(0, extent);
    return;
  }
  std::vector<int64_t> index(dims.size(), 0);
  for (int64_t i = 0; i < num_runs; ++i) {
    int64_t offset = 0;
    for (size_t d = 0; d < dims.size(); ++d) offset += index[d] * dims[d].first;
    add(offset, run);
    for (size_t d = dims.size(); d-- > 0;) {
      if (++index[d] < dims[d].second) break;
      index[d] = 0;
    }
  }
}

Tensor host_alias(const Tensor& tensor) {
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  auto* data = const_cast<void*>(storage->data());
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage->nbytes(),
                     c10::DataPtr(data, c10::kCPU), c10::GetAllocator(c10::kCPU),
                     /*resizable=*/true);
  Tensor host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    tensor.storage_offset());
  return host;
}

}  // namespace fsdp::sim
