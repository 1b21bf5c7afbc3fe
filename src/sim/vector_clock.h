#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::sim {

/// A stream or a host thread.
using Timeline = int32_t;
using Tick = uint32_t;

/// A point on a timeline. Tick 0 is before everything.
struct Moment {
  Timeline timeline = -1;
  Tick tick = 0;
};

/// For each timeline, the last moment of it that is known to be over.
class VectorClock {
 public:
  [[nodiscard]] bool covers(const Moment& moment) const {
    return moment.tick == 0 || tick(moment.timeline) >= moment.tick;
  }
  [[nodiscard]] Tick tick(Timeline timeline) const {
    const auto i = static_cast<size_t>(timeline);
    return i < ticks_.size() ? ticks_[i] : 0;
  }
  /// One step on `timeline`, which must be the clock's own.
  Moment advance(Timeline timeline) {
    const auto i = static_cast<size_t>(timeline);
    if (i >= ticks_.size()) ticks_.resize(i + 1, 0);
    return {timeline, ++ticks_[i]};
  }
  void join(const VectorClock& other) {
    if (ticks_.size() < other.ticks_.size()) ticks_.resize(other.ticks_.size(), 0);
    for (size_t i = 0; i < other.ticks_.size(); ++i) {
      ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
    }
  }
  /// join(), if `moment`, the last step of the clock's own timeline, is not known yet: else all
  /// that `other` knew then is known, too.
  void join(const VectorClock& other, const Moment& moment) {
    if (!covers(moment)) join(other);
  }

 private:
  std::vector<Tick> ticks_;
};

}  // namespace fsdp::sim
