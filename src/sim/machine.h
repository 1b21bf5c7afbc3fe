#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/Stream.h>

#include "fsdp/sim.h"
#include "sim/race_detector.h"
#include "sim/vector_clock.h"

namespace fsdp::sim {

/// The npu's name, as c10 knows it.
inline constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;

/// A stream: what is known to be over where it stands, and its work that has not run yet.
struct StreamState {
  StreamState(c10::Stream stream, Timeline timeline);

  struct Task {
    std::function<void()> run;        // or, if empty:
    StreamState* wait_for = nullptr;  // run this stream's work up to `position` first
    uint64_t position = 0;
  };

  const c10::Stream id;
  const std::string name;
  const bool is_default;
  const Timeline timeline;
  VectorClock clock;
  std::deque<Task> queue;
  uint64_t num_queued = 0;
  uint64_t num_done = 0;
};

/// A recorded event: a place in a stream's work.
struct EventState {
  StreamState* stream = nullptr;
  uint64_t position = 0;
  VectorClock clock;
  Moment moment;
};

/// A thread that puts work on streams and waits for it.
struct HostThread {
  HostThread();
  ~HostThread();

  Timeline timeline = -1;
  VectorClock clock;
  Moment now;
  uint64_t num_exits_seen = 0;
  std::string name;
  std::vector<std::string> ranges;  // open record_function ranges
  std::string last_range;           // the one that was closed last
  c10::DeviceIndex device = 0;
  std::vector<StreamState*> streams;  // the current one of each device
  std::optional<Race> race;           // of a host access: to be thrown
};

/// The accelerators: streams, the order of all that happens, and its execution.
///
/// Order: a launch happens behind what was on its stream, behind the events that the stream waited
///        for, and behind all that the launching thread knew to be over. Threads learn from
///        synchronize(); a new thread knows what any thread knew when it first came here, and when
///        a thread ends the others know what it knew.
/// Threads: one lock for everything. In kEager kernels run outside of it.
class Machine {
 public:
  static Machine& get();

  void enable(int num_devices);
  [[nodiscard]] int num_devices() const { return num_devices_; }

  [[nodiscard]] std::recursive_mutex& mutex() { return mutex_; }
  [[nodiscard]] HostThread& host();
  [[nodiscard]] StreamState& current_stream(c10::DeviceIndex device);
  [[nodiscard]] StreamState& stream(const c10::Stream& stream);
  [[nodiscard]] c10::Stream pool_stream(c10::DeviceIndex device);

  /// Puts work on a stream: `run` reads and writes `accesses`. It runs now or later.
  ///
  /// Errors:  RaceError, with nothing changed.
  void launch(StreamState& stream, std::string_view operation, const std::vector<Bytes>& accesses,
              std::function<void()> run);
  /// Notes accesses of an operation on a stream whose work is done elsewhere.
  void note(StreamState& stream, std::string_view operation, const std::vector<Bytes>& accesses);
  /// Notes an access by the calling thread itself. A race throws at the thread's next launch or
  /// wait.
  void note_host(std::string_view operation, const Bytes& bytes);

  void record(EventState& event, StreamState& stream);
  void wait(StreamState& stream, const EventState& event);
  void wait(StreamState& stream, StreamState& other);
  /// Runs what the event or stream covers; the calling thread knows then that it is over.
  void synchronize(const EventState& event);
  void synchronize(StreamState& stream);
  void synchronize_device(c10::DeviceIndex device);
  void synchronize_all();
  /// Runs the work queued so far, without anybody learning of it.
  void run_queued(StreamState& stream);
  [[nodiscard]] bool is_done(const EventState& event) const {
    return event.stream->num_done >= event.position;
  }

  [[nodiscard]] bool is_late(const StreamState& stream) const;
  [[nodiscard]] Execution execution() const { return execution_; }
  void set_execution(Execution execution);

  [[nodiscard]] OnRace on_race() const { return on_race_; }
  void set_on_race(OnRace on_race);
  [[nodiscard]] std::vector<Race> take_races();
  [[nodiscard]] RaceDetector& detector() { return detector_; }

  /// What a Trace sees.
  struct TraceLog {
    struct Entry {
      Launch launch;
      Moment moment;
      VectorClock clock;
    };
    std::vector<Entry> entries;
  };
  void attach(const std::shared_ptr<TraceLog>& log);
  void detach(const std::shared_ptr<TraceLog>& log);

 private:
  friend struct HostThread;
  Machine() = default;

  StreamState& new_stream(c10::DeviceIndex device, c10::StreamId id);
  [[nodiscard]] HostThread& host_now();
  [[nodiscard]] std::shared_ptr<Access> describe(std::string_view operation,
                                                 std::string stream_name);
  void check(const std::vector<Bytes>& accesses, const VectorClock& clock, Access& who);
  void note_launch(StreamState& stream, std::string_view operation,
                   const std::vector<Bytes>& accesses);
  void join_host(StreamState& stream);
  void learn(const VectorClock& clock, const StreamState& stream);
  void run_until(StreamState& stream, uint64_t position);

  std::recursive_mutex mutex_;  // guards all below
  std::atomic<int> num_devices_ = 0;
  std::atomic<Execution> execution_ = Execution::kEager;
  std::atomic<OnRace> on_race_ = OnRace::kThrow;
  std::deque<StreamState> streams_;               // never goes
  std::vector<StreamState*> default_streams_;     // by device
  std::vector<std::vector<StreamState*>> pools_;  // by device
  std::vector<size_t> next_in_pool_;              // by device
  Timeline num_timelines_ = 0;
  std::vector<Timeline> free_timelines_;  // of threads that ended
  VectorClock over_;                      // what any thread knows
  uint64_t num_exits_ = 0;
  VectorClock exited_;  // what threads that ended knew
  RaceDetector detector_;
  std::vector<Race> races_;
  std::vector<std::shared_ptr<TraceLog>> logs_;
};

}  // namespace fsdp::sim
