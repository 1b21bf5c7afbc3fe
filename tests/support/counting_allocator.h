#pragma once

#include <atomic>
#include <cstdint>

#include <c10/core/Allocator.h>

namespace fsdp::testing {

/// Counts the bytes of CPU tensors that are alive, all ranks together, while it exists.
///
/// It stands in front of the allocator that was there, so it sees what really is allocated,
/// whatever the library says of itself. One at a time; tensors may outlive it.
class CountingAllocator {
 public:
  CountingAllocator();
  ~CountingAllocator();
  CountingAllocator(const CountingAllocator&) = delete;
  CountingAllocator& operator=(const CountingAllocator&) = delete;

  [[nodiscard]] int64_t live_bytes() const;
  /// The most that was alive since the last call.
  int64_t take_peak_bytes();

 private:
  c10::Allocator* previous_;
};

}  // namespace fsdp::testing
