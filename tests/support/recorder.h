#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fsdp/events.h"

namespace fsdp::testing {

/// Writes schedule events down as FSDP2's tests do: "U layers.0 FORWARD", only those that changed
/// something for unshard, and no reshard of a group that stays unsharded after forward. With
/// `only_changes` also no post-backward that found no gradients.
class Recorder : public ScheduleObserver {
 public:
  explicit Recorder(std::string kinds = "UP", bool only_changes = false)
      : kinds_(std::move(kinds)), only_changes_(only_changes) {}

  void on_event(const ScheduleEvent& event) override;
  /// What was written since the last call.
  std::vector<std::string> take() { return std::exchange(lines_, {}); }

 private:
  std::string kinds_;
  bool only_changes_;
  std::vector<std::string> lines_;
};

/// The tables of docs/parity.md as lines of a Recorder: "U- UL0 PL1" is unshard of the root and of
/// layers.0, post-backward of layers.1; any other name is a path. In forward all events are of
/// state FORWARD; in backward U is of PRE_BACKWARD, R and P of POST_BACKWARD.
std::vector<std::string> forward_events(const std::string& table);
std::vector<std::string> backward_events(const std::string& table);

}  // namespace fsdp::testing
