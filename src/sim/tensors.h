#pragma once

#include <optional>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include "sim/machine.h"
#include "sim/race_detector.h"

namespace fsdp::sim {

[[nodiscard]] inline bool is_npu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kNpu;
}

/// The current stream of a device.
[[nodiscard]] StreamState& stream_of(const c10::Device& device);

/// Adds the bytes that a tensor's elements lie in: one range where they are dense, one a row else.
void add_bytes(std::vector<Bytes>& bytes, const at::Tensor& tensor, bool is_write);

/// A CPU tensor over the same bytes as `tensor`. It does not keep them: like a kernel's pointer, it
/// stays valid when the tensor is freed, and then sees what the memory is used for next.
[[nodiscard]] at::Tensor host_alias(const at::Tensor& tensor);

/// Another tensor over the storage of `tensor`, of its dtype unless another is given.
[[nodiscard]] at::Tensor view_of(const at::Tensor& tensor, c10::IntArrayRef sizes,
                                 c10::IntArrayRef strides, int64_t offset,
                                 std::optional<caffe2::TypeMeta> dtype = std::nullopt);

/// Kernels run as below autograd, whatever the thread that happens to run them is doing.
class KernelMode {
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  at::DisableRecordFunctionGuard not_recorded_;  // the call was
};

}  // namespace fsdp::sim
