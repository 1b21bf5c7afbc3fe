#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <c10/core/Allocator.h>

#include "fsdp/sim.h"
#include "sim/machine.h"

namespace fsdp::sim {

/// The device memory of all npus: blocks of a stream are given out again to that stream at once, as
/// CUDA's caching allocator does, because what comes later on it runs later. So memory that another
/// stream still uses when it is freed is a hazard, which the race detector sees in this way: with
/// each allocation on a stream all of its free bytes count as written, those that happen not to be
/// given out, too.
///
/// Memory:  taken from the host in segments of 2 MiB (blocks up to 1 MiB), 20 MiB (up to 10 MiB) or
///          the block's size; a block is split when 512 bytes or more are left.
/// Threads: the machine's lock.
class DeviceMemory final : public c10::Allocator {
 public:
  static DeviceMemory& get();

  /// On the current stream of the current device.
  ///
  /// Errors:  RaceError if a stream may still use what was freed for this one.
  c10::DataPtr allocate(size_t num_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &free_pointer; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override;

  /// The block will not be given out again before what `stream` has now is done.
  void record_stream(const void* data, StreamState& stream);
  [[nodiscard]] bool contains(const void* data) const;
  [[nodiscard]] c10::Device device_of(const void* data) const;

  [[nodiscard]] MemoryStats stats(int device) const;
  void reset_peak_stats(int device);
  void empty_cache();

 private:
  struct Block {
    uintptr_t begin = 0;
    size_t size = 0;
    bool is_small = false;
    bool is_allocated = false;
    StreamState* stream = nullptr;
    Block* previous = nullptr;  // in its segment
    Block* next = nullptr;
    std::vector<StreamState*> users;  // by record_stream
  };
  struct FreeOrder {
    bool operator()(const Block* a, const Block* b) const {
      return std::tie(a->stream->timeline, a->is_small, a->size, a->begin) <
             std::tie(b->stream->timeline, b->is_small, b->size, b->begin);
    }
  };
  struct Waiting {  // freed, but other streams that it was recorded on may use it
    Block* block = nullptr;
    std::vector<EventState> events;
  };

  static void free_pointer(void* data);
  void free(void* data);
  void free_block(Block* block);
  void reclaim(StreamState& stream);
  Block* take(StreamState& stream, size_t size);
  void split(Block* block, size_t size);
  void count(Block* block, int sign);

  std::set<Block*, FreeOrder> free_;
  std::unordered_map<const void*, Block*> allocated_;
  std::deque<Waiting> waiting_;
  std::map<Timeline, std::vector<Bytes>> freed_;  // since the last allocation, by stream
  std::vector<MemoryStats> stats_ = std::vector<MemoryStats>(128);  // by device
};

/// Pinned host memory: streams copy to and from it while the host goes on.
class PinnedMemory final : public c10::Allocator {
 public:
  static PinnedMemory& get();

  c10::DataPtr allocate(size_t num_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &free_pointer; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
  [[nodiscard]] bool contains(const void* data) const;
  [[nodiscard]] bool is_used() const { return num_blocks_ > 0; }

 private:
  static void free_pointer(void* data);

  std::map<uintptr_t, size_t> blocks_;  // begin to size
  std::atomic<size_t> num_blocks_ = 0;
};

}  // namespace fsdp::sim
