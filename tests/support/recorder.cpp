#include "support/recorder.h"

#include <sstream>

namespace fsdp::testing {
namespace {

char letter_of(ScheduleEventKind kind) {
  switch (kind) {
    case ScheduleEventKind::kUnshard:
      return 'U';
    case ScheduleEventKind::kReshard:
      return 'R';
    case ScheduleEventKind::kPostBackward:
      return 'P';
  }
  return '?';
}

// "L0" is layers.0, "-" the root, anything else a path.
std::string path_of(const std::string& name) {
  if (name == "-") return "";
  const bool is_layer = name.size() >= 2 && name[0] == 'L' && std::isdigit(name[1]) != 0;
  return is_layer ? "layers." + name.substr(1) : name;
}

std::vector<std::string> events(const std::string& table, const char* unshard, const char* other) {
  std::vector<std::string> lines;
  std::istringstream stream(table);
  for (std::string token; stream >> token;) {
    const char* state = token[0] == 'U' ? unshard : other;
    lines.push_back(std::string(1, token[0]) + " '" + path_of(token.substr(1)) + "' " + state);
  }
  return lines;
}

}  // namespace

void Recorder::on_event(const ScheduleEvent& event) {
  const char letter = letter_of(event.kind);
  if (kinds_.find(letter) == std::string::npos) return;
  const bool shows_all = event.kind == ScheduleEventKind::kPostBackward && !only_changes_;
  if (!event.changed && !shows_all) return;
  lines_.push_back(std::string(1, letter) + " '" + event.module_path + "' " +
                   to_string(event.training_state));
}

std::vector<std::string> forward_events(const std::string& table) {
  return events(table, "FORWARD", "FORWARD");
}

std::vector<std::string> backward_events(const std::string& table) {
  return events(table, "PRE_BACKWARD", "POST_BACKWARD");
}

}  // namespace fsdp::testing
