#include "sim/race_detector.h"

#include <algorithm>
#include <iterator>

namespace fsdp::sim {

RaceDetector::Cells::const_iterator RaceDetector::first_cell(uintptr_t begin) const {
  auto cell = cells_.upper_bound(begin);
  if (cell != cells_.begin() && std::prev(cell)->second.end > begin) --cell;
  return cell;
}

// Makes `address` a border between cells; returns the first cell that begins there or behind it.
RaceDetector::Cells::iterator RaceDetector::split_at(uintptr_t address) {
  auto next = cells_.lower_bound(address);
  if (next == cells_.begin()) return next;
  const auto cell = std::prev(next);
  if (cell->second.end <= address) return next;
  Cell behind = cell->second;
  cell->second.end = address;
  return cells_.emplace_hint(next, address, std::move(behind));
}

std::optional<Race> RaceDetector::find(const Bytes& bytes, const VectorClock& clock,
                                       const Access& who) const {
  for (auto cell = first_cell(bytes.begin); cell != cells_.end() && cell->first < bytes.end;
       ++cell) {
    const size_t num_bytes =
        std::min(cell->second.end, bytes.end) - std::max(cell->first, bytes.begin);
    const auto race_with = [&](const Entry& entry) -> std::optional<Race> {
      if (clock.covers(entry.moment)) return std::nullopt;
      return Race{.first = *entry.who, .second = who, .num_bytes = num_bytes};
    };
    if (auto race = race_with(cell->second.write)) return race;
    if (!bytes.is_write) continue;
    for (const Entry& read : cell->second.reads) {
      if (auto race = race_with(read)) return race;
    }
  }
  return std::nullopt;
}

void RaceDetector::note(const Bytes& bytes, const VectorClock& clock, const Moment& moment,
                        const Who& who) {
  if (bytes.begin >= bytes.end) return;
  split_at(bytes.begin);
  const auto last = split_at(bytes.end);
  if (bytes.is_write) {
    cells_.erase(cells_.lower_bound(bytes.begin), last);
    cells_.emplace(bytes.begin, Cell{.end = bytes.end, .write = {moment, who}, .reads = {}});
    return;
  }
  uintptr_t at = bytes.begin;
  for (auto cell = cells_.lower_bound(bytes.begin); at < bytes.end;) {
    const uintptr_t next = cell == cells_.end() ? bytes.end : std::min(cell->first, bytes.end);
    if (at < next) {  // never accessed
      cells_.emplace_hint(cell, at, Cell{.end = next, .write = {}, .reads = {{moment, who}}});
      at = next;
      continue;
    }
    auto& reads = cell->second.reads;
    std::erase_if(reads, [&](const Entry& entry) { return clock.covers(entry.moment); });
    reads.push_back({moment, who});
    at = cell->second.end;
    ++cell;
  }
}

void RaceDetector::forget(uintptr_t begin, uintptr_t end) {
  split_at(begin);
  const auto last = split_at(end);
  cells_.erase(cells_.lower_bound(begin), last);
}

}  // namespace fsdp::sim
