#include "module/fsdp_state.h"

#include <algorithm>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/range.h"
#include "fsdp/error.h"
#include "module/hooks.h"
#include "module/module_tree.h"
#include "module/same_model.h"

namespace fsdp {
namespace {

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// A dictionary entry that is some group's unsharded parameter: the parameter is shared with a
// module that the group's fully_shard() did not reach, which would compute with freed memory.
void check_no_foreign_params(const std::string& path, torch::nn::Module& module) {
  for (const auto& entry : parameter_dict(module)) {
    FSDP_CHECK(ConfigError, !is_unsharded_param(entry.value()), "fully_shard: parameter '",
               join_path(path, entry.key()),
               "' is shared with a module that was sharded on its own. Shard their common parent "
               "in one call instead, or do not share it.");
  }
}

// The states of a tree, with the paths of the modules that each was given to.
using StateTree = std::vector<std::pair<std::vector<std::string>, std::shared_ptr<FSDPState>>>;

// Compares what the groups of this rank hold with the other ranks, over each of their meshes.
void check_same_model(const StateTree& tree) {
  std::vector<std::pair<ProcessGroupPtr, std::string>> descriptions;  // a line for each parameter
  const auto add = [&](const ProcessGroupPtr& group, const std::string& text) {
    for (auto& [known, description] : descriptions) {
      if (known == group) {
        description += text;
        return;
      }
    }
    descriptions.emplace_back(group, text);
  };
  for (const auto& [paths, state] : tree) {
    if (state->group() == nullptr) continue;
    const FSDPMeshInfo& mesh_info = *state->group()->mesh_info();
    const std::string text = state->group()->describe();
    add(mesh_info.shard_group(), text);
    if (mesh_info.replicate_mesh_dim) {
      add(mesh_info.mesh->get_group(*mesh_info.replicate_mesh_dim), text);
    }
  }
  for (const auto& [group, description] : descriptions) check_same_on_ranks(description, *group);
}

// Ends a backward: runs what autograd did not reach, then leaves nothing in flight.
void end_of_backward(RootContext& context) {
  const Range range("FSDP::root_post_backward_callback");
  context.iteration_root = nullptr;
  const auto states = context.states();
  for (const auto& state : states) {
    FSDPParamGroup* group = state->group();
    if (group == nullptr) continue;
    // Also for gradients that came after the group's own post-backward, from a use of its
    // parameters outside of its modules.
    if (group->training_state() != TrainingState::kPostBackward || group->has_unreduced_grads()) {
      group->post_backward();
    }
    group->leave_backward();
  }
  // On CPU nothing else would write the sharded gradients: there are no streams to do it later.
  if (context.is_last_backward ||
      !has_streams(context.comm->compute_stream().raw().device_type())) {
    context.comm->finish_reductions();
  }
  if (context.is_last_backward) {
    for (const auto& state : states) {
      if (state->group() != nullptr) state->group()->finalize_backward();
    }
    context.comm->post_forward_order.clear();
  }
  context.queued_graph_task.reset();
}

}  // namespace

std::vector<std::shared_ptr<FSDPState>> RootContext::states() const {
  std::vector<std::shared_ptr<FSDPState>> result;
  for (const auto& state : all_states) {
    if (auto alive = state.lock()) result.push_back(std::move(alive));
  }
  return result;
}

void RootContext::set_max_reductions() const {
  size_t max_reductions = 1;
  for (const auto& state : states()) {
    if (state->group() == nullptr) continue;
    max_reductions =
        std::max(max_reductions, state->group()->settings().reduce_scatter_max_input_buffers);
  }
  comm->set_max_reductions(max_reductions);
}

FSDPState::FSDPState(std::vector<const torch::nn::Module*> modules, c10::Device device,
                     std::shared_ptr<FSDPParamGroup> group, const MixedPrecisionPolicy& mp_policy,
                     bool auto_reshard)
    : modules_(std::move(modules)),
      device_(device),
      group_(std::move(group)),
      mp_policy_(mp_policy),
      auto_reshard_(auto_reshard) {}

void FSDPState::lazy_init(torch::nn::Module& module) {
  FSDP_CHECK(StateError, !is_list(),
             "forward: the first module that runs was sharded in a list, and a list cannot be the "
             "root. Shard their common parent too, and call it.");
  StateTree tree;
  for_each_module(module, [&](const std::string& path, torch::nn::Module& submodule) {
    check_no_foreign_params(path, submodule);
    std::shared_ptr<FSDPState> state = state_of(submodule);
    if (!state) return;
    const auto known = std::find_if(tree.begin(), tree.end(),
                                    [&](const auto& entry) { return entry.second == state; });
    if (known != tree.end()) {
      known->first.push_back(path);
      return;
    }
    FSDP_CHECK(StateError, state.get() == this || !state->is_initialized(), "forward: module '",
               path,
               "' has been lazily initialized as a root of its own. Run forward through the root "
               "module first: call the model before any of its parts.");
    tree.emplace_back(std::vector<std::string>{path}, std::move(state));
  });

  context_->comm = std::make_shared<CommContext>(device_);
  int64_t number = 0;
  for (const auto& [paths, state] : tree) {
    if (state->group_) {
      state->group_->join_root(paths, ++number, context_->comm);
      if (state.get() == this && auto_reshard_) {
        // The root's parameters are needed first in backward: keep them.
        state->group_->settings().post_forward_mesh_info = nullptr;
      }
      state->group_->lazy_init();
    }
  }
  check_same_model(tree);
  for (const auto& [paths, state] : tree) {
    state->is_root_ = state.get() == this;
    state->context_ = context_;
    context_->all_states.push_back(state);
  }
  context_->set_max_reductions();
}

// What only the outermost forward does.
void FSDPState::begin_iteration(torch::nn::Module& module, TensorRefs& inputs) {
  if (!is_root_) lazy_init(module);
  if (context_->iteration_root != nullptr) return;
  const Range range("FSDP::root_pre_forward");
  const bool backward_threw = context_->queued_graph_task.has_value() && !in_backward();
  if (context_->needs_reset || backward_threw) reset_iter_state();
  context_->iteration_root = this;
  Event optimized = std::exchange(context_->post_optim_event, Event());
  if (!optimized.recorded()) optimized = context_->comm->compute_stream().record();
  context_->comm->all_gather_streams_wait(optimized);
  if (!has_streams(device_.type())) return;
  for (at::Tensor* input : inputs) {
    if (input->device() != device_) *input = input->to(device_, /*non_blocking=*/true);
  }
}

void FSDPState::pre_forward(torch::nn::Module& module, TensorRefs& inputs) {
  const bool casts = mp_policy_.cast_forward_inputs && mp_policy_.param_dtype.has_value();
  if (training_state_ == TrainingState::kPreBackward && in_backward()) {
    // Recomputed inside backward: its parameters may have been resharded by an earlier visit.
    if (group_) {
      group_->unshard();
      group_->wait_for_unshard();
    }
    if (casts) cast_floating(inputs, *mp_policy_.param_dtype);
    return;
  }
  const bool first = training_state_ != TrainingState::kForward;
  if (first) {
    begin_iteration(module, inputs);  // which may reset what a step that threw left
  } else if (!is_list()) {
    ++num_nested_forwards_;
  }
  if (modules_to_run_.empty()) modules_to_run_ = modules_;
  training_state_ = TrainingState::kForward;
  if (casts) cast_floating(inputs, *mp_policy_.param_dtype);
  if (group_ && group_->pre_forward()) add_post_backward_node(inputs, shared_from_this());
  if (!first) return;
  for (const auto& target : forward_prefetch) {
    const auto state = target.lock();
    if (state && state->group_) state->group_->prefetch(TrainingState::kForward);
  }
}

void FSDPState::post_forward(torch::nn::Module& module, TensorRefs& outputs) {
  const auto to_run = std::find(modules_to_run_.begin(), modules_to_run_.end(), &module);
  if (num_nested_forwards_ > 0) {  // the module called itself: the outer forward goes on
    --num_nested_forwards_;
  } else if (to_run != modules_to_run_.end() && training_state_ != TrainingState::kPreBackward) {
    modules_to_run_.erase(to_run);
    if (modules_to_run_.empty()) {
      complete_forward(outputs);
      if (context_->iteration_root == this) {
        complete_other_forwards(outputs);
        context_->comm->free_gathered();
        context_->iteration_root = nullptr;
      }
    }
  }
  if (mp_policy_.output_dtype) cast_floating(outputs, *mp_policy_.output_dtype);
}

void FSDPState::complete_forward(TensorRefs& outputs) {
  if (group_) group_->post_forward();
  add_pre_backward_hook(outputs, shared_from_this());
  training_state_ = TrainingState::kIdle;
}

// A list of which some modules did not run ends with the root: the root's output stands for theirs.
void FSDPState::complete_other_forwards(TensorRefs& outputs) {
  const auto states = context_->states();
  for (auto it = states.rbegin(); it != states.rend(); ++it) {
    FSDPState& state = **it;
    if (&state == this || state.modules_to_run_.empty()) continue;
    state.modules_to_run_.clear();
    state.complete_forward(outputs);
    if (state.mp_policy_.output_dtype) cast_floating(outputs, *state.mp_policy_.output_dtype);
  }
}

void FSDPState::forward_threw(torch::nn::Module&) noexcept {
  if (in_backward()) {
    // Backward ends with this error, and the next forward finds it unfinished; or a recomputation
    // has stopped early, and the end of backward resets the state.
    if (num_nested_forwards_ > 0) {
      --num_nested_forwards_;
    } else {
      modules_to_run_.clear();
    }
    return;
  }
  training_state_ = TrainingState::kIdle;
  num_nested_forwards_ = 0;
  modules_to_run_.clear();
  if (group_) group_->reset_iteration(/*drop_unsharded_grads=*/false);
  if (context_->iteration_root == this) {
    context_->iteration_root = nullptr;
    context_->needs_reset = true;
  }
}

void FSDPState::converted(torch::nn::Module&) {
  if (group_) group_->take_back_sharded_params();
}

void FSDPState::queue_final_callback() {
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (context_->queued_graph_task == graph_task) return;
  context_->queued_graph_task = graph_task;
  torch::autograd::Engine::get_default_engine().queue_callback([context = context_] {
    for (const auto& state : context->states()) {
      state->training_state_ = TrainingState::kIdle;
      state->modules_to_run_.clear();
    }
    end_of_backward(*context);
  });
}

void FSDPState::pre_backward() {
  training_state_ = TrainingState::kPreBackward;
  queue_final_callback();
  if (group_) group_->pre_backward(/*default_prefetch=*/backward_prefetch.empty());
  for (const auto& target : backward_prefetch) {
    const auto state = target.lock();
    if (state && state->group_) state->group_->prefetch(TrainingState::kPreBackward);
  }
}

void FSDPState::post_backward() {
  queue_final_callback();  // pre_backward did, unless the outputs were of a type we cannot look
                           // into
  if (group_) group_->post_backward();
}

void FSDPState::unshard(bool async_op) {
  if (!group_) return;
  if (!is_initialized()) group_->lazy_init();
  group_->unshard(async_op);
}

void FSDPState::reset_iter_state() {
  const bool backward_threw = context_->queued_graph_task.has_value();
  context_->iteration_root = nullptr;
  context_->queued_graph_task.reset();
  context_->needs_reset = false;
  if (!context_->comm) return;  // nothing has run yet
  for (const auto& state : context_->states()) {
    state->training_state_ = TrainingState::kIdle;
    state->num_nested_forwards_ = 0;
    state->modules_to_run_.clear();
    if (state->group_) state->group_->reset_iteration(/*drop_unsharded_grads=*/backward_threw);
  }
  context_->comm->drop_in_flight();
}

std::shared_ptr<FSDPState> state_of(const torch::nn::Module& module) {
  const auto* fsdp_module = dynamic_cast<const FSDPModule*>(&module);
  if (fsdp_module == nullptr) return nullptr;
  return std::dynamic_pointer_cast<FSDPState>(fsdp_module->forward_hooks());
}

}  // namespace fsdp
