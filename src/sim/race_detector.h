#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "fsdp/sim.h"
#include "sim/vector_clock.h"

namespace fsdp::sim {

/// Contiguous bytes that an operation reads or writes.
struct Bytes {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool is_write = false;
};

/// Remembers for each byte of device and pinned memory its last write and the reads since, and
/// finds accesses that nothing orders.
///
/// Memory:  a cell for each range that was accessed alike, until it is written or forgotten.
/// Threads: the caller holds the machine's lock.
class RaceDetector {
 public:
  using Who = std::shared_ptr<const Access>;

  /// The race between an access at the time of `clock` and those before it, if there is one.
  [[nodiscard]] std::optional<Race> find(const Bytes& bytes, const VectorClock& clock,
                                         const Access& who) const;
  /// Notes the access, which happens at `moment`.
  void note(const Bytes& bytes, const VectorClock& clock, const Moment& moment, const Who& who);
  /// The memory is gone.
  void forget(uintptr_t begin, uintptr_t end);
  void clear() { cells_.clear(); }

 private:
  struct Entry {
    Moment moment;
    Who who;
  };
  struct Cell {
    uintptr_t end = 0;
    Entry write;
    std::vector<Entry> reads;  // since the write; none is ordered before another
  };
  using Cells = std::map<uintptr_t, Cell>;

  Cells::iterator split_at(uintptr_t address);
  [[nodiscard]] Cells::const_iterator first_cell(uintptr_t begin) const;

  Cells cells_;  // by their first byte; they do not overlap
};

}  // namespace fsdp::sim
