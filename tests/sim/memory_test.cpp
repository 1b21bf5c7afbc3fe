// The simulated device's caching allocator, and tensors of several devices and threads.

#include <cmath>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "base/stream.h"
#include "fsdp/sim.h"

namespace fsdp {
namespace {

constexpr int64_t kMiB = 1 << 20;

class SimMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    sim::enable();
    sim::empty_cache();
    for (const int device : {0, 1}) sim::reset_peak_memory_stats(device);
    before_ = sim::memory_stats();
  }
  void TearDown() override {
    sim::set_execution(sim::Execution::kEager);
    EXPECT_TRUE(sim::take_races().empty());
  }

  static at::Tensor bytes(int64_t num_bytes, int device = 0) {
    return at::empty({num_bytes}, at::TensorOptions(at::kByte).device(sim::device(device)));
  }
  static const void* address(const at::Tensor& tensor) { return tensor.storage().data(); }
  [[nodiscard]] int64_t allocated() const {
    return sim::memory_stats().allocated - before_.allocated;
  }

  sim::MemoryStats before_;
};

TEST_F(SimMemory, CountsRoundedBlocks) {
  at::Tensor a = bytes(1), b = bytes(513);
  EXPECT_EQ(allocated(), 512 + 1024);
  a.reset();
  EXPECT_EQ(allocated(), 1024);
  EXPECT_EQ(sim::memory_stats().peak_allocated - before_.allocated, 512 + 1024);
  sim::reset_peak_memory_stats();
  EXPECT_EQ(sim::memory_stats().peak_allocated - before_.allocated, 1024);
  EXPECT_EQ(sim::memory_stats().num_allocations - before_.num_allocations, 2);
  (void)bytes(0);
  EXPECT_EQ(sim::memory_stats().num_allocations - before_.num_allocations, 2);
}

TEST_F(SimMemory, SegmentsAreThoseOfCuda) {
  const at::Tensor small = bytes(1);
  EXPECT_EQ(sim::memory_stats().reserved - before_.reserved, 2 * kMiB);
  const at::Tensor medium = bytes(kMiB + 1);
  EXPECT_EQ(sim::memory_stats().reserved - before_.reserved, 22 * kMiB);
  const at::Tensor large = bytes(21 * kMiB + 1);
  EXPECT_EQ(sim::memory_stats().reserved - before_.reserved, 44 * kMiB);
}

TEST_F(SimMemory, ABlockGoesBackToItsStream) {
  const Stream side = new_stream(sim::device(), false);
  at::Tensor a = bytes(4096);
  const void* where = address(a);
  a.reset();
  {
    const StreamGuard guard(side);
    EXPECT_NE(address(bytes(4096)), where);
  }
  EXPECT_EQ(address(bytes(4096)), where);
}

TEST_F(SimMemory, FreeNeighboursBecomeOneBlock) {
  at::Tensor a = bytes(300 * 1024), b = bytes(300 * 1024), c = bytes(300 * 1024);
  const void* where = address(a);
  a.reset();
  c.reset();
  b.reset();
  EXPECT_EQ(address(bytes(900 * 1024)), where);
}

TEST_F(SimMemory, EmptyCacheGivesSegmentsBack) {
  at::Tensor kept = bytes(100);
  at::Tensor large = bytes(30 * kMiB);
  large.reset();
  EXPECT_GE(sim::memory_stats().reserved - before_.reserved, 32 * kMiB);
  sim::empty_cache();
  EXPECT_EQ(sim::memory_stats().reserved - before_.reserved, 2 * kMiB);
  kept.fill_(3);
  EXPECT_EQ(kept.sum().item<int64_t>(), 300);
}

TEST_F(SimMemory, StorageGrowsAndKeepsItsBytes) {
  at::Tensor a = at::arange(8, at::kFloat).to(sim::device());
  a.resize_({4, 4});
  EXPECT_EQ(a.view({-1}).narrow(0, 0, 8).sum().item<double>(), 28);
  at::Tensor b = at::empty({0}, a.options());
  b.set_(a);
  EXPECT_EQ(address(b), address(a));
}

// In late execution memory that is given out anew holds NaN, as a reminder.
TEST_F(SimMemory, NewMemoryIsNaN) {
  sim::set_execution(sim::Execution::kLate);
  const at::Tensor a = at::empty({100}, at::TensorOptions(at::kFloat).device(sim::device()));
  EXPECT_TRUE(a.isnan().all().item<bool>());
}

// A block that another stream still uses holds back neither others nor what they are given out for.
TEST_F(SimMemory, ABlockInUseElsewhereLeavesOthersAlone) {
  const Stream side = new_stream(sim::device(), /*high_priority=*/false);
  sim::set_execution(sim::Execution::kLateSideStreams);
  const auto options = at::TensorOptions(at::kFloat).device(sim::device());
  at::Tensor used = at::ones({4}, options), other = at::ones({4}, options);
  side.wait(current_stream(sim::device()));
  {
    const StreamGuard on_side(side);
    (void)(used + 1);
  }
  used.record_stream(side.raw());
  used.reset();  // while the side stream has yet to read it
  const void* const place = address(other);
  other.reset();
  const at::Tensor again = at::full({4}, 3, options);
  EXPECT_EQ(address(again), place);
  side.record().synchronize();
  (void)at::empty({4}, options);
  EXPECT_EQ(again.sum().item<float>(), 12);
}

TEST_F(SimMemory, DevicesHaveTheirOwn) {
  const at::Tensor a = at::arange(6, at::kFloat).to(sim::device(0));
  const at::Tensor b = a.to(sim::device(1));
  EXPECT_EQ(b.device(), sim::device(1));
  EXPECT_EQ(sim::memory_stats(1).peak_allocated - sim::memory_stats(1).allocated, 0);
  EXPECT_EQ(sim::memory_stats(1).allocated, 512);
  EXPECT_TRUE(at::equal(b.cpu(), a.cpu()));
  for (const auto execution : {sim::Execution::kLateSideStreams, sim::Execution::kLate}) {
    sim::set_execution(execution);
    EXPECT_TRUE(at::equal((a.to(sim::device(1)) + b).to(sim::device(0)).cpu(), a.cpu() * 2));
  }
  EXPECT_THROW(at::empty({1}, at::TensorOptions().device(c10::Device(sim::device().type(), 99))),
               ConfigError);
}

// Rank threads may share a device and its default stream; each has its own current stream.
TEST_F(SimMemory, ThreadsShareADevice) {
  constexpr int kThreads = 16;
  std::vector<double> sums(kThreads);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kThreads; ++rank) {
    threads.emplace_back([rank, &sums] {
      const Stream side = new_stream(sim::device(), false), compute = current_stream(sim::device());
      for (int step = 0; step < 20; ++step) {
        const at::Tensor x =
            at::full({1000}, rank, at::TensorOptions(at::kFloat).device(sim::device()));
        side.wait(compute);
        at::Tensor y;
        {
          const StreamGuard guard(side);
          y = x * 2;
        }
        compute.wait(side);
        sums[rank] = y.sum().item<double>();
        side.wait(compute);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < kThreads; ++rank) EXPECT_EQ(sums[rank], 2000.0 * rank);
}

// What a thread waited for is over for those that come after it ends.
TEST_F(SimMemory, AThreadHandsOnWhatItWaitedFor) {
  at::Tensor x;
  std::thread([&x] {
    const StreamGuard guard(new_stream(sim::device(), false));
    x = at::ones({10}, at::TensorOptions(at::kFloat).device(sim::device()));
    sim::synchronize();
  }).join();
  EXPECT_EQ((x + 1).sum().item<double>(), 20);
}

}  // namespace
}  // namespace fsdp
