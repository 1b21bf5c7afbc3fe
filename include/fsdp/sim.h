#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "fsdp/error.h"

/// A simulated accelerator: the device type "npu" (PrivateUse1) with streams, events and a caching
/// allocator, whose memory is host memory and whose kernels are libtorch's CPU kernels.
///
/// It is for testing code that puts work on streams where there is no accelerator: every access to
/// device memory is checked for order (vector clocks), and work can be made to run as late as the
/// program's waits allow. docs/simulator.md says what it can tell and what not. Link fsdp_sim; a
/// program can have either this or a real PrivateUse1 backend.
namespace fsdp::sim {

/// Makes the device type "npu" available with `num_devices` devices (1 to 127). A second call may
/// only name the same number. No tensor, stream or generator of the type may exist before it.
///
/// Errors:  ConfigError.
void enable(int num_devices = 8);
[[nodiscard]] bool is_enabled();
[[nodiscard]] c10::Device device(int index = 0);

/// When the work of a stream runs. All of these keep the order within a stream and behind the
/// events that it waits for, so a program with all its waits computes the same in each of them.
enum class Execution {
  kEager,               ///< when it is put on its stream
  kLateSideStreams,     ///< on streams other than a device's default: when somebody waits for it
  kLateDefaultStreams,  ///< on default streams: when somebody waits for it
  kLate,                ///< on all streams: when somebody waits for it
};

/// From now on. Other than kEager, memory is filled with NaN when it is allocated and when it may
/// be given out again. Waits for all streams first.
void set_execution(Execution execution);
[[nodiscard]] Execution execution();

/// One of the two sides of a race.
struct Access {
  std::string operation;  ///< the operator, "allocation", "host read", ...
  bool is_write = false;
  std::string stream;  ///< "npu:0 stream 3", "host"
  /// The innermost range (record_function) at the call, "FSDP::all_gather (layers.0)", or the last
  /// one before it: "after FSDP::pre_forward (layers.0)" is the module's own computation.
  std::string place;
  std::string thread;  ///< its name: "rank 1"
};

/// Two accesses to the same bytes, at least one of them a write, with nothing that orders them.
struct Race {
  Access first;
  Access second;
  size_t num_bytes = 0;

  [[nodiscard]] std::string describe() const;
};

/// What the second of two accesses that race throws, before it changes anything.
class RaceError : public c10::Error {
 public:
  using c10::Error::Error;
};

enum class OnRace {
  kThrow,   ///< RaceError at the second access
  kRecord,  ///< kept for take_races()
  kIgnore,  ///< accesses are not followed at all
};

void set_on_race(OnRace on_race);
[[nodiscard]] OnRace on_race();
/// The races since the last call: with kThrow those that were thrown, with kRecord the first
/// hundred.
[[nodiscard]] std::vector<Race> take_races();

/// What the caching allocator of a device gives out, in bytes; blocks are rounded up to 512.
struct MemoryStats {
  int64_t allocated = 0;
  int64_t peak_allocated = 0;
  int64_t reserved = 0;  ///< taken from the host
  int64_t peak_reserved = 0;
  int64_t num_allocations = 0;
};

[[nodiscard]] MemoryStats memory_stats(int device_index = 0);
void reset_peak_memory_stats(int device_index = 0);
/// Waits for all streams and gives free blocks back to the host.
void empty_cache();

/// Waits for all work on a device, as the calling thread.
void synchronize(int device_index = 0);

/// One piece of work that was put on a stream, or, as "host waits", a thread's wait for a stream.
struct Launch {
  std::string operation;
  std::string stream;
  std::string place;
  std::string thread;
};

/// Follows what is put on streams, on all devices and by all threads, while it lives.
class Trace {
 public:
  Trace();
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  [[nodiscard]] std::vector<Launch> launches() const;
  /// Whether `second` cannot begin before `first` has ended; both are places in launches(), and
  /// `first` is no wait of the host.
  [[nodiscard]] bool is_ordered(size_t first, size_t second) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace fsdp::sim
