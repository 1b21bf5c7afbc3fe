#include "shard/storage.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/rand.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "fsdp/error.h"

namespace fsdp {
namespace {

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
