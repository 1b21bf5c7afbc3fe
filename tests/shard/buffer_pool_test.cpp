#include "shard/buffer_pool.h"

#include <utility>

#include <gtest/gtest.h>

#include "support/counting_allocator.h"

namespace fsdp {
namespace {

constexpr size_t kLarge = BufferPool::kMinKeptBytes;

// Promise: bytes that were given back serve the next buffer of the same size, the latest first, and
// no other.
TEST(BufferPool, ReusesTheLatestOfTheSameSize) {
  BufferPool pool(c10::kCPU);
  at::DataPtr a = pool.allocate(kLarge), b = pool.allocate(kLarge);
  const void* const address_a = a.get();
  const void* const address_b = b.get();
  EXPECT_NE(address_a, address_b);
  pool.give_back(std::move(a), kLarge);
  pool.give_back(std::move(b), kLarge);
  EXPECT_EQ(pool.kept_bytes(), 2 * kLarge);
  const at::DataPtr other = pool.allocate(kLarge + 1);
  EXPECT_NE(other.get(), address_a);
  EXPECT_NE(other.get(), address_b);
  EXPECT_EQ(pool.allocate(kLarge).get(), address_b);
  EXPECT_EQ(pool.allocate(kLarge).get(), address_a);
  EXPECT_EQ(pool.kept_bytes(), 0U);
}

// Promise: never more than two are kept, the oldest go; small ones and none at all are not.
TEST(BufferPool, IsBounded) {
  testing::CountingAllocator allocator;
  BufferPool pool(c10::kCPU);
  for (size_t i = 1; i <= 5; ++i) pool.give_back(pool.allocate(i * kLarge), i * kLarge);
  EXPECT_EQ(pool.kept_bytes(), 9 * kLarge);
  EXPECT_EQ(allocator.live_bytes(), static_cast<int64_t>(9 * kLarge));
  pool.give_back(pool.allocate(kLarge - 1), kLarge - 1);
  pool.give_back(at::DataPtr(), kLarge);
  EXPECT_EQ(pool.kept_bytes(), 9 * kLarge);
  pool.release();
  EXPECT_EQ(pool.kept_bytes(), 0U);
  EXPECT_EQ(allocator.live_bytes(), 0);
}

// Promise: a tensor's bytes are kept only if nothing else holds the tensor or its storage.
TEST(BufferPool, KeepsNothingThatIsInUse) {
  BufferPool pool(c10::kCPU);
  const int64_t numel = kLarge / sizeof(float);
  at::Tensor tensor = pool.allocate(numel, at::kFloat);
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({numel}));
  EXPECT_EQ(tensor.scalar_type(), at::kFloat);
  {
    const at::Tensor same = tensor;
    pool.give_back(std::move(tensor));
    EXPECT_EQ(pool.kept_bytes(), 0U);
    same.fill_(1);  // its bytes are still there
    tensor = same;
  }
  {
    const at::Tensor view = tensor.view({2, numel / 2});
    pool.give_back(std::move(tensor));
    EXPECT_EQ(pool.kept_bytes(), 0U);
    EXPECT_EQ(view.sum().item<float>(), static_cast<float>(numel));
  }
  pool.give_back(pool.allocate(numel, at::kFloat));
  EXPECT_EQ(pool.kept_bytes(), kLarge);
  pool.give_back(at::Tensor());
  EXPECT_EQ(pool.kept_bytes(), kLarge);
}

}  // namespace
}  // namespace fsdp
