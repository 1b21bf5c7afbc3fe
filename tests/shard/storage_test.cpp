#include "shard/storage.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/rand.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include "fsdp/error.h"

namespace fsdp {
namespace {

// A device type whose kernels expect a StorageImpl of their own, as torch_npu's do; its memory is
// the host's.
struct OwnStorage final : c10::StorageImpl {
  using c10::StorageImpl::StorageImpl;
  int64_t behind = 7;  // what a kernel would read
};

struct OwnAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr host = c10::GetAllocator(c10::kCPU)->allocate(bytes);
    const c10::DeleterFnPtr deleter = host.get_deleter();
    void* const context = host.release_context();
    return {context, context, deleter, c10::Device(c10::kPrivateUse1, 0)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

OwnAllocator own_allocator;
const bool is_registered = [] {
  c10::SetAllocator(c10::kPrivateUse1, &own_allocator);
  c10::SetStorageImplCreate(
      c10::kPrivateUse1,
      [](c10::StorageImpl::use_byte_size_t use_bytes, c10::SymInt bytes, c10::DataPtr data,
         c10::Allocator* allocator, bool resizable) -> c10::intrusive_ptr<c10::StorageImpl> {
        if (data == nullptr) data = allocator->allocate(bytes.as_int_unchecked());
        return c10::make_intrusive<OwnStorage>(use_bytes, std::move(bytes), std::move(data),
                                               allocator, resizable);
      });
  return true;
}();
C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1>);

at::Tensor empty_of_own(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                        std::optional<bool> /*pin_memory*/,
                        std::optional<at::MemoryFormat> /*memory_format*/) {
  const auto bytes = c10::multiply_integers(sizes) * c10::elementSize(*dtype);
  const at::Storage storage(c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(), bytes, {},
                                                   &own_allocator, /*resizable=*/true,
                                                   c10::Device(c10::kPrivateUse1, 0)));
  return tensor_over(storage, *dtype, 0, sizes);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_of_own);
}

// Promise: where kernels expect a StorageImpl of their own, a group's storage is such a one; it is
// freed from the start, without an allocation, takes bytes, and is known as a group's.
TEST(Storage, OfDevicesWithStoragesOfTheirOwn) {
  ASSERT_TRUE(is_registered);
  const c10::Device device(c10::kPrivateUse1, 0);
  const at::Storage storage = make_freed_storage(96, device, "the weight is away");
  const auto* own = dynamic_cast<const OwnStorage*>(storage.unsafeGetStorageImpl());
  ASSERT_NE(own, nullptr);
  EXPECT_EQ(own->behind, 7);
  EXPECT_EQ(storage.nbytes(), 96u);
  EXPECT_FALSE(storage.resizable());
  EXPECT_FALSE(is_allocated(storage));
  EXPECT_TRUE(is_group_storage(storage));
  const at::Tensor tensor = tensor_over(storage, at::kFloat, 8, {16});
  EXPECT_EQ(tensor.device(), device);
  EXPECT_ANY_THROW((void)tensor.const_data_ptr());

  const at::Tensor bytes = at::empty({96}, at::TensorOptions(device).dtype(at::kByte));
  EXPECT_FALSE(is_group_storage(bytes.storage()));
  const auto* const address = static_cast<const char*>(bytes.const_data_ptr());
  move_bytes(bytes.storage(), storage);
  EXPECT_EQ(tensor.const_data_ptr(), address + 8 * sizeof(float));
  free_storage(storage, "the weight is away again");
  EXPECT_FALSE(is_allocated(storage));
  allocate_storage(storage);
  EXPECT_TRUE(is_allocated(storage));
}

// Promise: a freed storage throws its message, keeps its size, and takes bytes again at another
// address, under the same tensor.
TEST(Storage, FreeThenRefill) {
  at::Tensor tensor = at::rand({64, 64});
  const at::Tensor original = tensor.clone();
  const at::Storage storage = tensor.storage();
  free_storage(storage, "the weight is away");
  EXPECT_FALSE(is_allocated(storage));
  EXPECT_EQ(storage.nbytes(), 64u * 64 * 4);
  try {
    (tensor + 1).sum().item<float>();
    FAIL() << "reading a freed tensor did not throw";
  } catch (const c10::Error& error) {
    EXPECT_NE(message_of(error).find("the weight is away"), std::string::npos);
  }
  const at::Tensor occupies_the_old_address = at::rand({64, 64});
  allocate_storage(storage);
  tensor_over(storage, at::kFloat, 0, {64 * 64}).copy_(original.view(-1));
  EXPECT_TRUE(tensor.equal(original));
}

// Promise: what autograd saved before a free is read after the refill, and a refill through a
// tensor of its own moves no version counter.
TEST(Storage, BackwardAfterRefill) {
  const at::Tensor weight = at::rand({8, 8}).set_requires_grad(true);
  const at::Tensor values = weight.detach().clone();
  const at::Tensor x = at::rand({2, 8}).set_requires_grad(true);
  const at::Tensor y = at::linear(x, weight);
  const int64_t version = weight._version();
  free_storage(weight.storage(), "away");
  EXPECT_THROW(y.sum().backward({}, /*retain_graph=*/true), c10::Error);
  allocate_storage(weight.storage());
  tensor_over(weight.storage(), at::kFloat, 0, {64}).copy_(values.view(-1));
  EXPECT_EQ(weight._version(), version);
  at::linear(x, weight).sum().backward();
  const at::Tensor grad = x.grad().clone();
  x.mutable_grad().reset();
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(grad));
}

// Promise: tensor_over is nobody's view and sits where it is asked to.
TEST(Storage, TensorOverPart) {
  const at::Tensor flat = at::rand({10});
  const int64_t version = flat._version();
  const at::Tensor part = tensor_over(flat.storage(), at::kFloat, 4, {2, 3});
  EXPECT_TRUE(part.equal(flat.narrow(0, 4, 6).view({2, 3})));
  EXPECT_FALSE(part.is_view());
  part.zero_();
  EXPECT_EQ(flat._version(), version);
}

}  // namespace
}  // namespace fsdp
