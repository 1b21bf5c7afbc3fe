#include "sim/memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "sim/host_access.h"

namespace fsdp::sim {
namespace {

constexpr size_t kRound = 512;
constexpr size_t kSmallLimit = size_t{1} << 20;
constexpr size_t kSmallSegment = size_t{2} << 20;
constexpr size_t kMediumLimit = size_t{10} << 20;
constexpr size_t kMediumSegment = size_t{20} << 20;
constexpr size_t kLargeRound = size_t{2} << 20;
constexpr int kNan = 0xff;  // as every byte: NaN in every floating dtype

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

size_t segment_size(size_t size) {
  if (size <= kSmallLimit) return kSmallSegment;
  if (size < kMediumLimit) return kMediumSegment;
  return round_up(size, kLargeRound);
}

void* take_from_host(size_t size) {
  void* data = std::aligned_alloc(kRound, size);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

void fill_with_nan(StreamState& stream, const std::vector<Bytes>& ranges) {
  Machine& machine = Machine::get();
  if (machine.execution() == Execution::kEager) return;
  stream.queue.push_back({.run = [ranges] {
    for (const Bytes& bytes : ranges) {
      std::memset(reinterpret_cast<void*>(bytes.begin), kNan, bytes.end - bytes.begin);
    }
  }});
  ++stream.num_queued;
  if (!machine.is_late(stream)) machine.run_queued(stream);
}

}  // namespace

DeviceMemory& DeviceMemory::get() {
  static auto* memory = new DeviceMemory;  // tensors may outlive static objects
  return *memory;
}

c10::DataPtr DeviceMemory::allocate(size_t num_bytes) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex());
  const c10::DeviceIndex index = machine.host().device;
  const c10::Device device(kNpu, index);
  if (num_bytes == 0) return {nullptr, nullptr, &free_pointer, device};
  StreamState& stream = machine.current_stream(index);
  reclaim(stream);
  Block* block = take(stream, round_up(num_bytes, kRound));
  const std::vector<Bytes> bytes = {
      {.begin = block->begin, .end = block->begin + block->size, .is_write = true}};
  try {
    machine.note(stream, "allocation", bytes);
  } catch (...) {
    free_.insert(block);
    throw;
  }
  fill_with_nan(stream, bytes);
  block->is_allocated = true;
  auto* data = reinterpret_cast<void*>(block->begin);
  allocated_.emplace(data, block);
  count(block, 1);
  return {data, data, &free_pointer, device};
}

// All of the stream's free bytes might be given out now.
void DeviceMemory::reclaim(StreamState& stream) {
  Machine& machine = Machine::get();
  const auto is_done = [&](const EventState& event) { return machine.is_done(event); };
  while (!waiting_.empty()) {
    Waiting& first = waiting_.front();
    if (!std::all_of(first.events.begin(), first.events.end(), is_done)) break;
    // The host has seen that the events are over, so what it launches comes behind them.
    for (const EventState& event : first.events) {
      first.block->stream->clock.join(event.clock, event.moment);
    }
    free_block(first.block);
    waiting_.pop_front();
  }
  auto freed = freed_.find(stream.timeline);
  if (freed == freed_.end()) return;
  const std::vector<Bytes> ranges = std::move(freed->second);
  freed_.erase(freed);
  machine.note(stream, "allocation, which may be given this freed memory", ranges);
  fill_with_nan(stream, ranges);
}

DeviceMemory::Block* DeviceMemory::take(StreamState& stream, size_t size) {
  Block wanted{.size = size, .is_small = size <= kSmallLimit, .stream = &stream};
  const auto found = free_.lower_bound(&wanted);
  Block* block = nullptr;
  if (found != free_.end() && (*found)->stream == &stream &&
      (*found)->is_small == wanted.is_small) {
    block = *found;
    free_.erase(found);
  } else {
    const size_t segment = segment_size(size);
    block = new Block{.begin = reinterpret_cast<uintptr_t>(take_from_host(segment)),
                      .size = segment,
                      .is_small = wanted.is_small,
                      .stream = &stream};
    MemoryStats& stats = stats_.at(static_cast<size_t>(stream.id.device_index()));
    stats.reserved += static_cast<int64_t>(segment);
    stats.peak_reserved = std::max(stats.peak_reserved, stats.reserved);
  }
  split(block, size);
  return block;
}

void DeviceMemory::split(Block* block, size_t size) {
  if (block->size < size + kRound) return;
  auto* rest = new Block{.begin = block->begin + size,
                         .size = block->size - size,
                         .is_small = block->is_small,
                         .stream = block->stream,
                         .previous = block,
                         .next = block->next};
  if (rest->next != nullptr) rest->next->previous = rest;
  block->next = rest;
  block->size = size;
  free_.insert(rest);
}

void DeviceMemory::free_pointer(void* data) {
  if (data != nullptr) get().free(data);
}

void DeviceMemory::free(void* data) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex());
  const auto found = allocated_.find(data);
  Block* block = found->second;
  allocated_.erase(found);
  count(block, -1);
  if (block->users.empty()) {
    free_block(block);
    return;
  }
  Waiting waiting{.block = block, .events = {}};
  for (StreamState* user : std::exchange(block->users, {})) {
    machine.record(waiting.events.emplace_back(), *user);
  }
  waiting_.push_back(std::move(waiting));
}

void DeviceMemory::free_block(Block* block) {
  block->is_allocated = false;
  freed_[block->stream->timeline].push_back(
      {.begin = block->begin, .end = block->begin + block->size, .is_write = true});
  const auto merge_next = [](Block* first) {
    Block* second = first->next;
    first->size += second->size;
    first->next = second->next;
    if (first->next != nullptr) first->next->previous = first;
    delete second;
  };
  if (block->next != nullptr && free_.erase(block->next) > 0) merge_next(block);
  if (block->previous != nullptr && free_.erase(block->previous) > 0) {
    block = block->previous;
    merge_next(block);
  }
  free_.insert(block);
}

void DeviceMemory::count(Block* block, int sign) {
  MemoryStats& stats = stats_.at(static_cast<size_t>(block->stream->id.device_index()));
  stats.allocated += sign * static_cast<int64_t>(block->size);
  stats.peak_allocated = std::max(stats.peak_allocated, stats.allocated);
  if (sign > 0) ++stats.num_allocations;
}

void DeviceMemory::copy_data(void* to, const void* from, size_t num_bytes) const {
  Machine& machine = Machine::get();
  const auto range = [&](const void* data, bool is_write) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    return Bytes{.begin = begin, .end = begin + num_bytes, .is_write = is_write};
  };
  machine.launch(machine.current_stream(device_of(to).index()), "raw copy",
                 {range(from, false), range(to, true)},
                 [to, from, num_bytes] { std::memcpy(to, from, num_bytes); });
}

void DeviceMemory::record_stream(const void* data, StreamState& stream) {
  const std::lock_guard lock(Machine::get().mutex());
  const auto found = allocated_.find(data);
  if (found == allocated_.end() || found->second->stream == &stream) return;
  auto& users = found->second->users;
  if (std::find(users.begin(), users.end(), &stream) == users.end()) users.push_back(&stream);
}

bool DeviceMemory::contains(const void* data) const {
  const std::lock_guard lock(Machine::get().mutex());
  return allocated_.count(data) > 0;
}

c10::Device DeviceMemory::device_of(const void* data) const {
  const std::lock_guard lock(Machine::get().mutex());
  const auto found = allocated_.find(data);
  FSDP_CHECK(ConfigError, found != allocated_.end(),
             "sim: this address is not the begin of a block of device memory.");
  return found->second->stream->id.device();
}

MemoryStats DeviceMemory::stats(int device) const {
  const std::lock_guard lock(Machine::get().mutex());
  return stats_.at(static_cast<size_t>(device));
}

void DeviceMemory::reset_peak_stats(int device) {
  const std::lock_guard lock(Machine::get().mutex());
  MemoryStats& stats = stats_.at(static_cast<size_t>(device));
  stats.peak_allocated = stats.allocated;
  stats.peak_reserved = stats.reserved;
}

void DeviceMemory::empty_cache() {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex());
  machine.synchronize_all();
  for (Waiting& waiting : std::exchange(waiting_, {})) free_block(waiting.block);
  freed_.clear();
  std::erase_if(free_, [&](Block* block) {
    if (block->previous != nullptr || block->next != nullptr) return false;
    stats_.at(static_cast<size_t>(block->stream->id.device_index())).reserved -=
        static_cast<int64_t>(block->size);
    machine.detector().forget(block->begin, block->begin + block->size);
    std::free(reinterpret_cast<void*>(block->begin));
    delete block;
    return true;
  });
}

PinnedMemory& PinnedMemory::get() {
  static auto* memory = new PinnedMemory;
  return *memory;
}

c10::DataPtr PinnedMemory::allocate(size_t num_bytes) {
  if (num_bytes == 0) return {nullptr, nullptr, &free_pointer, c10::Device(c10::kCPU)};
  follow_host_accesses();
  const size_t size = round_up(num_bytes, 64);
  void* data = take_from_host(round_up(size, kRound));
  const std::lock_guard lock(Machine::get().mutex());
  blocks_.emplace(reinterpret_cast<uintptr_t>(data), size);
  num_blocks_ = blocks_.size();
  return {data, data, &free_pointer, c10::Device(c10::kCPU)};
}

void PinnedMemory::free_pointer(void* data) {
  if (data == nullptr) return;
  PinnedMemory& memory = get();
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex());
  const auto block = memory.blocks_.find(reinterpret_cast<uintptr_t>(data));
  // Copies that have not run keep their tensor, so nothing uses it any more.
  machine.detector().forget(block->first, block->first + block->second);
  memory.blocks_.erase(block);
  memory.num_blocks_ = memory.blocks_.size();
  std::free(data);
}

bool PinnedMemory::contains(const void* data) const {
  if (!is_used()) return false;
  const std::lock_guard lock(Machine::get().mutex());
  const auto address = reinterpret_cast<uintptr_t>(data);
  auto block = blocks_.upper_bound(address);
  if (block == blocks_.begin()) return false;
  --block;
  return address < block->first + block->second;
}

}  // namespace fsdp::sim
