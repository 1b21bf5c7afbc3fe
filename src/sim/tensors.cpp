#include "sim/tensors.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>

namespace fsdp::sim {

using at::Tensor;

namespace {

// More rows than this count as one range from the first to the last: checking each would take
// longer than the kernel.
constexpr int64_t kMaxRanges = 1 << 14;

}  // namespace

StreamState& stream_of(const c10::Device& device) {
  return Machine::get().current_stream(device.index());
}

Tensor view_of(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides,
               int64_t offset, std::optional<caffe2::TypeMeta> dtype) {
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(),
      dtype.value_or(tensor.dtype()));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
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
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

}  // namespace fsdp::sim
