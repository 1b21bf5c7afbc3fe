#include "fsdp/events.h"

#include <c10/util/Exception.h>

namespace fsdp {

const char* to_string(TrainingState state) {
  switch (state) {
    case TrainingState::kIdle:
      return "IDLE";
    case TrainingState::kForward:
      return "FORWARD";
    case TrainingState::kPreBackward:
      return "PRE_BACKWARD";
    case TrainingState::kPostBackward:
      return "POST_BACKWARD";
  }
  TORCH_INTERNAL_ASSERT(false);
}

const char* to_string(ScheduleEventKind kind) {
  switch (kind) {
    case ScheduleEventKind::kUnshard:
      return "unshard";
    case ScheduleEventKind::kReshard:
      return "reshard";
    case ScheduleEventKind::kPostBackward:
      return "post_backward";
  }
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace fsdp
