#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/events.h"
#include "fsdp/fsdp_module.h"
#include "schedule/fsdp_param_group.h"

namespace fsdp {

class FSDPState;

/// What the states of one root's tree share after lazy init.
struct RootContext {
  std::shared_ptr<CommContext> comm;
  std::vector<std::weak_ptr<FSDPState>> all_states;  ///< in the order of the module tree
  const FSDPState* iteration_root = nullptr;  ///< whose forward is the outermost; only compared
  std::optional<int> queued_graph_task;       ///< the backward whose end will call us
  bool is_last_backward = true;
  Event post_optim_event;    ///< the next gathers wait for it in place of the compute stream
  bool needs_reset = false;  ///< a forward threw

  [[nodiscard]] std::vector<std::shared_ptr<FSDPState>> states() const;
  /// Gives the streams the largest value of all groups.
  void set_max_reductions() const;
};

/// The state that fully_shard() gives a module, or a list of modules together: what their forward
/// and backward do, and when.
///
/// Owned by the hooked module, and by the autograd nodes that will call it: the graph may outlive
/// the module. Source: PyTorch 2.13, torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState.
class FSDPState final : public ForwardHooks, public std::enable_shared_from_this<FSDPState> {
 public:
  /// `group` may be null: a module all of whose parameters belong to other groups.
  FSDPState(std::vector<const torch::nn::Module*> modules, c10::Device device,
            std::shared_ptr<FSDPParamGroup> group, const MixedPrecisionPolicy& mp_policy,
            bool auto_reshard);

  void pre_forward(torch::nn::Module& module, TensorRefs& inputs) override;
  void post_forward(torch::nn::Module& module, TensorRefs& outputs) override;
  void forward_threw(torch::nn::Module& module) noexcept override;
  void converted(torch::nn::Module& module) override;

  /// The gradient of an output has arrived.
  void pre_backward();
  /// The gradients of all inputs have arrived, so the parameters have theirs.
  void post_backward();

  void unshard(bool async_op);
  void reset_iter_state();
  [[nodiscard]] bool is_root() const { return is_root_.value_or(false); }
  [[nodiscard]] bool is_initialized() const { return is_root_.has_value(); }

  [[nodiscard]] const c10::Device& device() const { return device_; }
  [[nodiscard]] FSDPParamGroup* group() const { return group_.get(); }
  [[nodiscard]] const std::shared_ptr<RootContext>& context() const { return context_; }

  /// An explicit choice is not the root's to change at lazy init.
  void clear_auto_reshard() { auto_reshard_ = false; }
  std::vector<std::weak_ptr<FSDPState>> forward_prefetch;
  std::vector<std::weak_ptr<FSDPState>> backward_prefetch;

 private:
  void lazy_init(torch::nn::Module& module);
  void begin_iteration(torch::nn::Module& module, TensorRefs& inputs);
  [[nodiscard]] bool is_list() const { return modules_.size() > 1; }
  void complete_forward(TensorRefs& outputs);
  void complete_other_forwards(TensorRefs& outputs);
  void queue_final_callback();

  const std::vector<const torch::nn::Module*> modules_;  // only compared: they own this
  std::vector<const torch::nn::Module*>
      modules_to_run_;  // of a list: those yet to run this forward
  c10::Device device_;
  std::shared_ptr<FSDPParamGroup> group_;  // autograd nodes and prefetch orders refer to it
  MixedPrecisionPolicy mp_policy_;
  bool auto_reshard_;  // reshard_after_forward was left unset
  TrainingState training_state_ = TrainingState::kIdle;
  int num_nested_forwards_ = 0;
  std::optional<bool> is_root_;  // unset until lazy init
  std::shared_ptr<RootContext> context_ = std::make_shared<RootContext>();
};

/// The state of a module; null if fully_shard() was not called on it.
[[nodiscard]] std::shared_ptr<FSDPState> state_of(const torch::nn::Module& module);

}  // namespace fsdp
