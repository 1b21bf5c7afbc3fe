#include "support/counting_allocator.h"

#include <c10/core/CPUAllocator.h>

namespace fsdp::testing {
namespace {

std::atomic<int64_t> live_bytes_now{0};
std::atomic<int64_t> peak_bytes_now{0};

void count(int64_t bytes) {
  const int64_t live = live_bytes_now += bytes;
  int64_t peak = peak_bytes_now;
  while (live > peak && !peak_bytes_now.compare_exchange_weak(peak, live)) {
  }
}

struct Block {
  c10::DataPtr bytes;
  int64_t num_bytes;
};

// Static: tensors made through it hold its deleter.
class Allocator final : public c10::Allocator {
 public:
  c10::Allocator* inner = nullptr;

  c10::DataPtr allocate(size_t num_bytes) override {
    c10::DataPtr bytes = inner->allocate(num_bytes);
    void* const data = bytes.get();
    if (data == nullptr) return bytes;
    count(static_cast<int64_t>(num_bytes));
    auto* const block = new Block{std::move(bytes), static_cast<int64_t>(num_bytes)};
    return {data, block, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }

 private:
  static void free_block(void* context) {
    auto* const block = static_cast<Block*>(context);
    count(-block->num_bytes);
    delete block;
  }
};

Allocator& the_allocator() {
  static Allocator allocator;
  return allocator;
}

}  // namespace

CountingAllocator::CountingAllocator() : previous_(c10::GetCPUAllocator()) {
  the_allocator().inner = previous_;
  c10::SetCPUAllocator(&the_allocator(), /*priority=*/1);
  take_peak_bytes();
}

CountingAllocator::~CountingAllocator() { c10::SetCPUAllocator(previous_, /*priority=*/1); }

int64_t CountingAllocator::live_bytes() const { return live_bytes_now; }

int64_t CountingAllocator::take_peak_bytes() { return peak_bytes_now.exchange(live_bytes_now); }

}  // namespace fsdp::testing
