#include "sim/machine.h"

#include <pthread.h>

#include <utility>

#include <c10/util/StringUtil.h>

namespace fsdp::sim {
namespace {

// As many as a job of 128 rank threads on one device uses; then streams are shared, as CUDA's are
// after 32. Sharing hides races, so the pool is large.
constexpr size_t kPoolSize = 1024;
constexpr size_t kMaxRaces = 100;

std::string name_of(const c10::Stream& stream) {
  const std::string device = c10::str("npu:", static_cast<int>(stream.device_index()));
  return stream.id() == 0 ? device + " default stream" : c10::str(device, " stream ", stream.id());
}

[[noreturn]] void throw_race(const Race& race) {
  throw RaceError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, race.describe());
}

Launch to_launch(const Access& access) {
  return {.operation = access.operation,
          .stream = access.stream,
          .place = access.place,
          .thread = access.thread};
}

std::string name_of_thread() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof(name));
  return name;
}

}  // namespace

StreamState::StreamState(c10::Stream stream, Timeline timeline)
    : id(stream), name(name_of(stream)), is_default(stream.id() == 0), timeline(timeline) {}

HostThread::HostThread() : name(name_of_thread()) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex_);
  if (machine.free_timelines_.empty()) {
    timeline = machine.num_timelines_++;
  } else {
    timeline = machine.free_timelines_.back();
    machine.free_timelines_.pop_back();
  }
  clock.join(machine.over_);
  clock.join(machine.exited_);
  num_exits_seen = machine.num_exits_;
  now = clock.advance(timeline);
  streams = machine.default_streams_;
}

HostThread::~HostThread() {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex_);
  machine.exited_.join(clock);
  ++machine.num_exits_;
  machine.free_timelines_.push_back(timeline);
}

Machine& Machine::get() {
  static auto* machine = new Machine;  // threads and tensors may outlive static objects
  return *machine;
}

HostThread& Machine::host() {
  thread_local HostThread thread;
  return thread;
}

// This thread with what threads that have ended knew.
HostThread& Machine::host_now() {
  HostThread& thread = host();
  if (thread.race && on_race_ == OnRace::kThrow) throw_race(*std::exchange(thread.race, {}));
  thread.race.reset();
  if (thread.num_exits_seen != num_exits_) {
    thread.num_exits_seen = num_exits_;
    thread.clock.join(exited_);
    thread.now = thread.clock.advance(thread.timeline);
  }
  return thread;
}

void Machine::enable(int num_devices) {
  const std::lock_guard lock(mutex_);
  for (int i = 0; i < num_devices; ++i) {
    const auto device = static_cast<c10::DeviceIndex>(i);
    default_streams_.push_back(&new_stream(device, 0));
  }
  pools_.resize(static_cast<size_t>(num_devices));
  next_in_pool_.resize(static_cast<size_t>(num_devices), 0);
  num_devices_ = num_devices;
}

StreamState& Machine::new_stream(c10::DeviceIndex device, c10::StreamId id) {
  const c10::Stream stream(c10::Stream::UNSAFE, c10::Device(kNpu, device), id);
  return streams_.emplace_back(stream, num_timelines_++);
}

StreamState& Machine::current_stream(c10::DeviceIndex device) {
  HostThread& thread = host();
  if (thread.streams.empty()) thread.streams = default_streams_;  // it came before enable()
  return *thread.streams.at(static_cast<size_t>(device));
}

StreamState& Machine::stream(const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  const auto device = static_cast<size_t>(stream.device_index());
  if (stream.id() == 0) return *default_streams_.at(device);
  return *pools_.at(device).at(static_cast<size_t>(stream.id() - 1));
}

c10::Stream Machine::pool_stream(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  auto& pool = pools_.at(static_cast<size_t>(device));
  size_t& next = next_in_pool_.at(static_cast<size_t>(device));
  if (pool.size() < kPoolSize) {
    pool.push_back(&new_stream(device, static_cast<c10::StreamId>(pool.size() + 1)));
    return pool.back()->id;
  }
  return pool[next++ % kPoolSize]->id;
}

std::shared_ptr<Access> Machine::describe(std::string_view operation, std::string stream_name) {
  const HostThread& thread = host();
  auto who = std::make_shared<Access>();
  who->operation = operation;
  who->stream = std::move(stream_name);
  who->thread = thread.name;
  if (!thread.ranges.empty()) {
    who->place = thread.ranges.back();
  } else if (!thread.last_range.empty()) {
    who->place = "after " + thread.last_range;
  }
  return who;
}

void Machine::check(const std::vector<Bytes>& accesses, const VectorClock& clock, Access& who) {
  for (const Bytes& bytes : accesses) {
    who.is_write = bytes.is_write;
    const std::optional<Race> race = detector_.find(bytes, clock, who);
    if (!race) continue;
    if (races_.size() < kMaxRaces) races_.push_back(*race);
    if (on_race_ == OnRace::kThrow) throw_race(*race);
    return;  // one of an operation is enough
  }
}

void Machine::join_host(StreamState& stream) {
  const HostThread& thread = host_now();
  stream.clock.join(thread.clock, thread.now);
}

void Machine::note_launch(StreamState& stream, std::string_view operation,
                          const std::vector<Bytes>& accesses) {
  join_host(stream);
  if (on_race_ == OnRace::kIgnore && logs_.empty()) return;
  const std::shared_ptr<Access> who = describe(operation, stream.name);
  if (on_race_ != OnRace::kIgnore) check(accesses, stream.clock, *who);
  const Moment moment = stream.clock.advance(stream.timeline);
  if (on_race_ != OnRace::kIgnore) {
    std::shared_ptr<Access> writer;
    for (const Bytes& bytes : accesses) {
      if (bytes.is_write && !writer) writer = std::make_shared<Access>(*who);
    }
    who->is_write = false;
    if (writer) writer->is_write = true;
    for (const Bytes& bytes : accesses) {
      detector_.note(bytes, stream.clock, moment, bytes.is_write ? writer : who);
    }
  }
  for (const auto& log : logs_) {
    log->entries.push_back({to_launch(*who), moment, stream.clock});
  }
}

void Machine::launch(StreamState& stream, std::string_view operation,
                     const std::vector<Bytes>& accesses, std::function<void()> run) {
  {
    const std::lock_guard lock(mutex_);
    note_launch(stream, operation, accesses);
    ++stream.num_queued;
    if (execution_ != Execution::kEager) {
      stream.queue.push_back({.run = std::move(run)});
      if (!is_late(stream)) run_until(stream, stream.num_queued);
      return;
    }
    ++stream.num_done;
  }
  run();
}

void Machine::note(StreamState& stream, std::string_view operation,
                   const std::vector<Bytes>& accesses) {
  const std::lock_guard lock(mutex_);
  note_launch(stream, operation, accesses);
}

void Machine::note_host(std::string_view operation, const Bytes& bytes) {
  const std::lock_guard lock(mutex_);
  if (on_race_ == OnRace::kIgnore) return;
  HostThread& thread = host();
  const std::shared_ptr<Access> who = describe(operation, "host");
  who->is_write = bytes.is_write;
  if (const auto race = detector_.find(bytes, thread.clock, *who)) {
    if (races_.size() < kMaxRaces) races_.push_back(*race);
    if (!thread.race) thread.race = *race;
  }
  thread.now = thread.clock.advance(thread.timeline);
  detector_.note(bytes, thread.clock, thread.now, who);
}

void Machine::record(EventState& event, StreamState& stream) {
  const std::lock_guard lock(mutex_);
  join_host(stream);
  event.stream = &stream;
  event.position = stream.num_queued;
  event.moment = stream.clock.advance(stream.timeline);
  event.clock = stream.clock;
}

void Machine::wait(StreamState& stream, const EventState& event) {
  const std::lock_guard lock(mutex_);
  join_host(stream);
  stream.clock.join(event.clock, event.moment);
  if (is_done(event) || event.stream == &stream) return;
  if (is_late(stream)) {
    stream.queue.push_back({.run = {}, .wait_for = event.stream, .position = event.position});
    ++stream.num_queued;
  } else {
    run_until(*event.stream, event.position);
  }
}

void Machine::wait(StreamState& stream, StreamState& other) {
  if (&stream == &other) return;
  EventState event;
  record(event, other);
  wait(stream, event);
}

void Machine::run_until(StreamState& stream, uint64_t position) {
  while (stream.num_done < position) {
    const StreamState::Task task = std::move(stream.queue.front());
    stream.queue.pop_front();
    ++stream.num_done;
    if (task.wait_for != nullptr) {
      run_until(*task.wait_for, task.position);
    } else {
      task.run();
    }
  }
}

void Machine::run_queued(StreamState& stream) {
  const std::lock_guard lock(mutex_);
  run_until(stream, stream.num_queued);
}

void Machine::learn(const VectorClock& clock, const StreamState& stream) {
  HostThread& thread = host_now();
  for (const auto& log : logs_) {
    const std::shared_ptr<Access> who = describe("host waits", stream.name);
    log->entries.push_back({to_launch(*who), Moment{}, clock});
  }
  thread.clock.join(clock);
  thread.now = thread.clock.advance(thread.timeline);
  over_.join(thread.clock);
}

void Machine::synchronize(const EventState& event) {
  const std::lock_guard lock(mutex_);
  run_until(*event.stream, event.position);
  learn(event.clock, *event.stream);
}

void Machine::synchronize(StreamState& stream) {
  const std::lock_guard lock(mutex_);
  join_host(stream);
  run_until(stream, stream.num_queued);
  learn(stream.clock, stream);
}

void Machine::synchronize_device(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  for (StreamState& stream : streams_) {
    if (stream.id.device_index() == device) synchronize(stream);
  }
}

void Machine::synchronize_all() {
  const std::lock_guard lock(mutex_);
  for (StreamState& stream : streams_) synchronize(stream);
}

bool Machine::is_late(const StreamState& stream) const {
  switch (execution_.load()) {
    case Execution::kEager:
      return false;
    case Execution::kLateSideStreams:
      return !stream.is_default;
    case Execution::kLateDefaultStreams:
      return stream.is_default;
    case Execution::kLate:
      return true;
  }
  return false;
}

void Machine::set_execution(Execution execution) {
  const std::lock_guard lock(mutex_);
  for (StreamState& stream : streams_) run_until(stream, stream.num_queued);
  execution_ = execution;
}

void Machine::set_on_race(OnRace on_race) {
  const std::lock_guard lock(mutex_);
  // What was not followed is not known: begin anew.
  if ((on_race == OnRace::kIgnore) != (on_race_ == OnRace::kIgnore)) detector_.clear();
  on_race_ = on_race;
}

std::vector<Race> Machine::take_races() {
  const std::lock_guard lock(mutex_);
  return std::exchange(races_, {});
}

void Machine::attach(const std::shared_ptr<TraceLog>& log) {
  const std::lock_guard lock(mutex_);
  logs_.push_back(log);
}

void Machine::detach(const std::shared_ptr<TraceLog>& log) {
  const std::lock_guard lock(mutex_);
  std::erase(logs_, log);
}

}  // namespace fsdp::sim
