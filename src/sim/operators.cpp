// Operators that the CPU's kernels cannot give: what concerns memory, views, copies, and values
// that go to the host.

#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "sim/machine.h"
#include "sim/memory.h"
#include "sim/tensors.h"

namespace fsdp::sim {
namespace {

using at::Tensor;

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
  TORCH_CHECK(tensor.dim() > 0 && step > 0 && size <= sizes[d], "unfold: size ", size, " and step ",
              step, " do not fit dimension ", d, " of ", tensor.sizes());
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

// Pageable memory is read at the call, pinned memory when the copy runs. As with CUDA, a copy that
// may block waits for the stream whatever the memory is.
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
  if (source._is_zerotensor()) return target.zero_();  // it has no memory
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
  return at::_local_scalar_dense(host);
}

bool equal(const Tensor& a, const Tensor& b) { return at::equal(a.cpu(), b.cpu()); }

void record_stream(Tensor& tensor, c10::Stream stream) {
  DeviceMemory::get().record_stream(tensor.storage().data(), Machine::get().stream(stream));
}

bool can_shallow_copy(const Tensor& tensor, const Tensor& other) { return true; }

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

// Copies read what is conjugated, negated or nothing but zeros themselves: to resolve that takes a
// copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, ZeroTensor, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace fsdp::sim
