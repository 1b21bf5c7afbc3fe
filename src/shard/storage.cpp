#include "shard/storage.h"

#include <optional>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

// The one file that touches StorageImpl's internals: they move between releases of torch.

namespace fsdp {
namespace {

// Known by its type.
struct GroupStorage final : c10::StorageImpl {
  using c10::StorageImpl::StorageImpl;
};

// Known by this allocator, which nobody asks: a StorageImpl of a device that has a type of its own.
// (torch_npu's kernels read members of it behind those of c10's.)
struct NoAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t /*bytes*/) override { TORCH_INTERNAL_ASSERT(false); }
  void copy_data(void* /*to*/, const void* /*from*/, size_t /*bytes*/) const override {
    TORCH_INTERNAL_ASSERT(false);
  }
};

NoAllocator* no_allocator() {
  static NoAllocator allocator;
  return &allocator;
}

at::Storage make_storage_of_device(int64_t bytes, c10::Device device) {
  const at::Storage storage = at::empty({0}, at::TensorOptions(device).dtype(at::kByte)).storage();
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  impl->set_resizable(false);
  impl->set_allocator(no_allocator());
  impl->set_nbytes(static_cast<size_t>(bytes));
  return storage;
}

}  // namespace

at::DataPtr free_storage(const at::Storage& storage, const std::string& access_error) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  if (impl->nbytes() == 0) return {};  // there is nothing to miss, and nothing to give back
  at::DataPtr bytes(nullptr, impl->device());
  std::swap(bytes, impl->_mutable_data_ptr_no_checks());
  // nbytes stays: operators that check sizes first then reach the data pointer, and our message.
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(access_error);
  return bytes;
}

at::Storage make_freed_storage(int64_t bytes, c10::Device device, const std::string& access_error) {
  at::Storage storage;
  if (c10::GetStorageImplCreate(device.type()) != nullptr) {
    storage = make_storage_of_device(bytes, device);
  } else {
    storage = at::Storage(c10::make_intrusive<GroupStorage>(
        c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(bytes),
        at::DataPtr(nullptr, device), c10::GetAllocator(device.type()), /*resizable=*/false));
  }
  free_storage(storage, access_error);
  return storage;
}

bool is_group_storage(const at::Storage& storage) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  return dynamic_cast<const GroupStorage*>(impl) != nullptr || impl->allocator() == no_allocator();
}

void move_bytes(const at::Storage& from, const at::Storage& to) {
  c10::StorageImpl* source = from.unsafeGetStorageImpl();
  c10::StorageImpl* target = to.unsafeGetStorageImpl();
  TORCH_INTERNAL_ASSERT(source->nbytes() == target->nbytes());
  if (target->nbytes() == 0) return;
  set_bytes(to, source->set_data_ptr(at::DataPtr(nullptr, source->device())));
}

void set_bytes(const at::Storage& storage, at::DataPtr bytes) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  impl->clear_data_ptr_access_error_msg_();
  impl->set_data_ptr_noswap(std::move(bytes));
}

void allocate_storage(const at::Storage& storage) {
  if (is_allocated(storage)) return;
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  const c10::DeviceGuard on_device(impl->device());
  set_bytes(storage, c10::GetAllocator(impl->device_type())->allocate(impl->nbytes()));
}

bool is_allocated(const at::Storage& storage) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  return impl->nbytes() == 0 || impl->_mutable_data_ptr_no_checks().get() != nullptr;
}

at::Tensor tensor_over(const at::Storage& storage, at::ScalarType dtype, int64_t offset,
                       at::IntArrayRef sizes) {
  std::optional<c10::InferenceMode> normal_tensors;
  if (c10::InferenceMode::is_enabled()) normal_tensors.emplace(/*enabled=*/false);
  const c10::Device device = storage.device();
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      at::Storage(storage),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, c10::kStrided, device)),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  return tensor;
}

}  // namespace fsdp
