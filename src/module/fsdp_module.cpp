#include "fsdp/fsdp_module.h"

#include <map>
#include <numeric>
#include <utility>

#include <torch/nn/module.h>

#include "fsdp/error.h"
#include "module/fsdp_state.h"
#include "module/module_tree.h"

namespace fsdp {
namespace {

std::shared_ptr<FSDPState> checked_state(FSDPModule& module, const char* method) {
  std::shared_ptr<FSDPState> state = state_of(module.as_module());
  FSDP_CHECK(StateError, state != nullptr, method, ": module of type ", module.as_module().name(),
             " was never sharded. Call fully_shard() on it first.");
  return state;
}

void for_each_group(FSDPModule& module, const char* method, bool recurse,
                    const std::function<void(FSDPState&, FSDPParamGroup&)>& change) {
  const std::shared_ptr<FSDPState> own = checked_state(module, method);
  if (!recurse) {
    if (own->group() != nullptr) change(*own, *own->group());
    return;
  }
  for_each_module(module.as_module(), [&](const std::string&, torch::nn::Module& submodule) {
    const auto state = state_of(submodule);
    if (state && state->group() != nullptr) change(*state, *state->group());
  });
}

std::vector<std::weak_ptr<FSDPState>> checked_states(const std::vector<FSDPModule*>& modules,
                                                     const char* method) {
  std::vector<std::weak_ptr<FSDPState>> states;
  for (size_t i = 0; i < modules.size(); ++i) {
    FSDP_CHECK(ConfigError, modules[i] != nullptr, method, ": module ", i, " of the list is null.");
    states.push_back(checked_state(*modules[i], method));
  }
  return states;
}

}  // namespace

void UnshardHandle::wait() {
  if (state_ && state_->group() != nullptr) state_->group()->wait_for_unshard();
  state_.reset();
}

void FSDPModule::unshard() {
  const auto state = checked_state(*this, "unshard");
  state->unshard(/*async_op=*/false);
  if (state->group() != nullptr) state->group()->wait_for_unshard();
}

UnshardHandle FSDPModule::unshard_async() {
  auto state = checked_state(*this, "unshard_async");
  state->unshard(/*async_op=*/true);
  return UnshardHandle(std::move(state));
}

void FSDPModule::reshard() {
  for_each_group(*this, "reshard", /*recurse=*/false,
                 [](FSDPState&, FSDPParamGroup& group) { group.reshard(); });
}

void FSDPModule::set_requires_gradient_sync(bool requires_gradient_sync, bool recurse) {
  for_each_group(*this, "set_requires_gradient_sync", recurse,
                 [&](FSDPState&, FSDPParamGroup& group) {
                   group.settings().reduce_grads = requires_gradient_sync;
                   group.settings().all_reduce_grads = requires_gradient_sync;
                 });
}

void FSDPModule::set_requires_all_reduce(bool requires_all_reduce, bool recurse) {
  for_each_group(*this, "set_requires_all_reduce", recurse, [&](FSDPState&, FSDPParamGroup& group) {
    group.settings().all_reduce_grads = requires_all_reduce;
  });
}

void FSDPModule::set_is_last_backward(bool is_last_backward) {
  checked_state(*this, "set_is_last_backward")->context()->is_last_backward = is_last_backward;
}

void FSDPModule::set_reduce_scatter_unused_params(bool reduce_scatter_unused_params, bool recurse) {
  for_each_group(*this, "set_reduce_scatter_unused_params", recurse,
                 [&](FSDPState&, FSDPParamGroup& group) {
                   group.settings().reduce_scatter_unused_params = reduce_scatter_unused_params;
                 });
}

void FSDPModule::set_reshard_after_forward(bool reshard_after_forward, bool recurse) {
  for_each_group(*this, "set_reshard_after_forward", recurse,
                 [&](FSDPState& state, FSDPParamGroup& group) {
                   state.clear_auto_reshard();
                   group.settings().post_forward_mesh_info =
                       reshard_after_forward ? group.mesh_info() : nullptr;
                 });
}

void FSDPModule::set_reshard_after_backward(bool reshard_after_backward, bool recurse) {
  for_each_group(*this, "set_reshard_after_backward", recurse,
                 [&](FSDPState&, FSDPParamGroup& group) {
                   group.settings().reshard_after_backward = reshard_after_backward;
                 });
}

void FSDPModule::set_unshard_in_backward(bool unshard_in_backward) {
  for_each_group(*this, "set_unshard_in_backward", /*recurse=*/false,
                 [&](FSDPState&, FSDPParamGroup& group) {
                   group.settings().unshard_in_backward = unshard_in_backward;
                 });
}

void FSDPModule::set_modules_to_forward_prefetch(const std::vector<FSDPModule*>& modules) {
  checked_state(*this, "set_modules_to_forward_prefetch")->forward_prefetch =
      checked_states(modules, "set_modules_to_forward_prefetch");
}

void FSDPModule::set_modules_to_backward_prefetch(const std::vector<FSDPModule*>& modules) {
  checked_state(*this, "set_modules_to_backward_prefetch")->backward_prefetch =
      checked_states(modules, "set_modules_to_backward_prefetch");
}

void FSDPModule::set_gradient_divide_factor(double factor) {
  FSDP_CHECK(ConfigError, factor > 0,
             "set_gradient_divide_factor: the factor must be positive, is ", factor, ".");
  for_each_group(
      *this, "set_gradient_divide_factor", /*recurse=*/false,
      [&](FSDPState&, FSDPParamGroup& group) { group.settings().gradient_divide_factor = factor; });
}

void FSDPModule::set_force_sum_reduction_for_comms(bool enable) {
  for_each_group(
      *this, "set_force_sum_reduction_for_comms", /*recurse=*/false,
      [&](FSDPState&, FSDPParamGroup& group) { group.settings().force_sum_reduction = enable; });
}

void FSDPModule::set_all_reduce_hook(std::function<void(const at::Tensor&)> hook,
                                     std::optional<c10::Stream> stream) {
  for_each_group(*this, "set_all_reduce_hook", /*recurse=*/false,
                 [&](FSDPState& state, FSDPParamGroup& group) {
                   FSDP_CHECK(
                       ConfigError, !stream || !group.mesh_info()->replicate_mesh_dim,
                       "set_all_reduce_hook: module '", group.module_path(),
                       "' is sharded over a mesh with replicas, whose all-reduce has a stream "
                       "of its own, behind which the hook runs. Pass no stream.");
                   FSDP_CHECK(ConfigError, !stream || stream->device() == state.device(),
                              "set_all_reduce_hook: the module is on ", state.device(),
                              ", but the stream is of ", stream->device(), ".");
                   group.settings().all_reduce_hook = hook;
                   group.settings().all_reduce_hook_stream.reset();
                   if (stream) group.settings().all_reduce_hook_stream.emplace(*stream);
                 });
}

void FSDPModule::set_reduce_scatter_max_input_buffers(int64_t max_input_buffers, bool recurse) {
  FSDP_CHECK(ConfigError, max_input_buffers >= 1,
             "set_reduce_scatter_max_input_buffers: at least 1 buffer is needed, found ",
             max_input_buffers, ".");
  for_each_group(*this, "set_reduce_scatter_max_input_buffers", recurse,
                 [&](FSDPState&, FSDPParamGroup& group) {
                   group.settings().reduce_scatter_max_input_buffers =
                       static_cast<size_t>(max_input_buffers);
                 });
  const auto state = checked_state(*this, "set_reduce_scatter_max_input_buffers");
  if (state->is_initialized()) state->context()->set_max_reductions();
}

void FSDPModule::set_separate_reduce_scatter_group(bool enable, bool recurse) {
  std::map<const c10d::ProcessGroup*, ProcessGroupPtr> groups;  // by shard group
  for_each_group(*this, "set_separate_reduce_scatter_group", recurse,
                 [&](FSDPState&, FSDPParamGroup& group) {
                   ProcessGroupPtr& own = group.settings().reduce_scatter_group;
                   if (!enable) {
                     own = nullptr;
                     return;
                   }
                   const ProcessGroupPtr& shard_group = group.mesh_info()->shard_group();
                   ProcessGroupPtr& shared = groups[shard_group.get()];
                   if (!shared) shared = own;
                   if (!shared) {
                     std::vector<int> ranks(static_cast<size_t>(shard_group->getSize()));
                     std::iota(ranks.begin(), ranks.end(), 0);
                     shared = new_group(shard_group, ranks);
                   }
                   own = shared;
                 });
}

void FSDPModule::set_post_optim_event(c10::Event event) {
  const auto state = checked_state(*this, "set_post_optim_event");
  FSDP_CHECK(ConfigError, event.device_type() == state->device().type(),
             "set_post_optim_event: the module is on ", state->device(),
             ", but the event is one of ", event.device_type(), ".");
  if (!has_streams(event.device_type())) return;
  FSDP_CHECK(ConfigError, event.was_marked_for_recording(),
             "set_post_optim_event: the event was not recorded. Record it on the optimizer's "
             "stream first, behind step().");
  state->context()->post_optim_event = Event(std::move(event));
}

void FSDPModule::release_buffers() {
  const auto context = checked_state(*this, "release_buffers")->context();
  if (context->comm) context->comm->pool()->release();
}

void FSDPModule::reset_iter_state() {
  const auto state = checked_state(*this, "reset_iter_state");
  FSDP_CHECK(StateError, !state->is_initialized() || state->is_root(),
             "reset_iter_state: call it on the root module, whose forward begins the step.");
  state->reset_iter_state();
}

std::vector<std::pair<std::string, at::Tensor>> FSDPModule::unsharded_parameters() const {
  const auto state = std::dynamic_pointer_cast<FSDPState>(forward_hooks_);
  FSDP_CHECK(StateError, state != nullptr,
             "unsharded_parameters: the module was never sharded. Call fully_shard() on it first.");
  std::vector<std::pair<std::string, at::Tensor>> result;
  if (state->group() == nullptr) return result;
  for (const FSDPParam& param : state->group()->params()) {
    result.emplace_back(param.name(), param.unsharded_param());
  }
  return result;
}

void set_schedule_observer(torch::nn::Module& root, std::shared_ptr<ScheduleObserver> observer) {
  for_each_module(root, [&](const std::string&, torch::nn::Module& module) {
    const auto state = state_of(module);
    if (state && state->group() != nullptr) state->group()->set_observer(observer);
  });
}

}  // namespace fsdp
