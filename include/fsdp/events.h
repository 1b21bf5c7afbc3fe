#pragma once

#include <memory>
#include <string>

namespace torch::nn {
class Module;
}

namespace fsdp {

/// Where a module or group stands in a training step.
/// Source: PyTorch 2.13, torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState.
enum class TrainingState { kIdle, kForward, kPreBackward, kPostBackward };

enum class ScheduleEventKind { kUnshard, kReshard, kPostBackward };

/// One call into a group's schedule.
struct ScheduleEvent {
  ScheduleEventKind kind;
  const std::string& module_path;  ///< from the root; "" is the root itself, also before lazy init
  TrainingState training_state;    ///< of the group; for post-backward, after it
  bool prefetch;                   ///< another module's turn asked for it
  /// Whether the call did something. unshard: it issued an all-gather. reshard: it freed or
  /// exchanged the unsharded parameters. post_backward: it found gradients.
  bool changed;
};

/// Told of each schedule event of the modules it is set on, in order, on the thread that runs them.
class ScheduleObserver {
 public:
  virtual ~ScheduleObserver() = default;
  /// unshard and reshard are told before they act, post_backward after, as FSDP2's tests record.
  virtual void on_event(const ScheduleEvent& event) = 0;
};

/// Sets the observer of every sharded module in the tree of `root` (null: none). Costs one pointer
/// test per event when there is none.
void set_schedule_observer(torch::nn::Module& root, std::shared_ptr<ScheduleObserver> observer);

/// "FORWARD", "PRE_BACKWARD", "POST_BACKWARD" or "IDLE", as FSDP2 prints them.
[[nodiscard]] const char* to_string(TrainingState state);
/// "unshard", "reshard" or "post_backward".
[[nodiscard]] const char* to_string(ScheduleEventKind kind);

}  // namespace fsdp
