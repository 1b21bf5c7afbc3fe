#include "schedule/fsdp_param_group.h"

#include <algorithm>
#include <utility>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "fsdp/error.h"
#include "schedule/prefetch.h"

namespace fsdp {

FSDPParamGroup::FSDPParamGroup(std::vector<FSDPParam> params, FSDPMeshInfoPtr mesh_info,
                               c10::Device device, GroupSettings settings)
    : params_(std::move(params)),
      mesh_info_(std::move(mesh_info)),
      device_(device),
      settings_(std::move(settings)),
      comm_(std::make_shared<CommContext>(device)) {}

void FSDPParamGroup::lazy_init() {
  if (sharded_state_ != ShardedState::kSharded) return;
  check_sharded_params();
  check_uniform_dtype();
  for (FSDPParam& param : params_) param.init_dtypes(settings_.mp_policy);
}

void FSDPParamGroup::join_root(std::string module_path, std::shared_ptr<CommContext> comm) {
  module_path_ = std::move(module_path);
  comm_ = std::move(comm);
  for (FSDPParam& param : params_) {
    param.set_fqn(module_path_.empty() ? param.name() : module_path_ + "." + param.name());
  }
}

void FSDPParamGroup::notify(ScheduleEventKind kind, bool changed) const {
  if (!observer_) return;
  observer_->on_event({.kind = kind,
                       .module_path = module_path_,
                       .training_state = training_state_,
                       .prefetch = prefetching_,
                       .changed = changed});
}

// A conversion of the module (to(), torch::load, set_data) moves sharded parameters off the flat
// shard without a word. Every gather looks first, so that no step runs with old weights.
void FSDPParamGroup::take_back_sharded_params() {
  for (FSDPParam& param : params_) {
    const at::Tensor& sharded = param.sharded_param();
    FSDP_CHECK(StateError, sharded.device() == device_, "unshard: the sharded parameter ",
               describe(param.spec()->fqn, param.spec()->sizes), " is on ", sharded.device(),
               ", its group works on ", device_,
               ". Move the model before fully_shard(), with the mesh of that device.");
    converted_ = param.reset_sharded_param() || converted_;
  }
}

void FSDPParamGroup::check_sharded_params() {
  take_back_sharded_params();
  if (!converted_) return;
  check_uniform_dtype();
  FSDP_CHECK(
      StateError,
      sharded_state_ == ShardedState::kSharded && training_state_ != TrainingState::kPreBackward,
      "unshard: the parameters of module '", module_path_,
      "' were converted or loaded between a forward and its backward. Do so before the "
      "forward, or after the optimizer's step.");
  for (FSDPParam& param : params_) param.init_dtypes(settings_.mp_policy);
  converted_ = false;
}

void FSDPParamGroup::check_uniform_dtype() const {
  const FSDPParam* first = nullptr;
  for (const FSDPParam& param : params_) {
    if (!param.sharded_param().requires_grad()) continue;
    if (first == nullptr) first = &param;
    FSDP_CHECK(ConfigError, param.orig_dtype() == first->orig_dtype(),
               "fully_shard: the trainable parameters of module '", module_path_,
               "' have different dtypes: '", first->spec()->fqn, "' is ", first->orig_dtype(),
               ", '", param.spec()->fqn, "' is ", param.orig_dtype(),
               ". Convert them to one dtype, or shard the modules that differ on their own.");
  }
}

void FSDPParamGroup::unshard(bool async_op) {
  const bool skipped =
      all_gather_result_.has_value() || is_unsharded() ||
      (!settings_.unshard_in_backward && training_state_ == TrainingState::kPreBackward);
  notify(ScheduleEventKind::kUnshard, /*changed=*/!skipped);
  if (skipped) return;
  if (reshard_event_.recorded()) {
    comm_->all_gather_streams_wait(reshard_event_);
    reshard_event_ = Event();
  }
  check_sharded_params();
  gathered_before_step_ = false;
  reduced_since_gather_ = false;
  for (FSDPParam& param : params_) {
    param.note_gather();
    gathered_before_step_ = gathered_before_step_ || param.sharded_param().grad().defined();
  }
  start_all_gather(async_op);
}

void FSDPParamGroup::start_all_gather(bool async_op) {
  const bool overlaps = !async_op && (training_state_ == TrainingState::kForward ||
                                      training_state_ == TrainingState::kPreBackward);
  const Stream compute = comm_->compute_stream();
  const AllGatherStreams streams =
      overlaps ? comm_->all_gather_streams()
               : AllGatherStreams{.copy_in = compute, .all_gather = compute};
  const FSDPMeshInfo& mesh_info = sharded_state_ == ShardedState::kShardedPostForward
                                      ? *settings_.post_forward_mesh_info
                                      : *mesh_info_;
  all_gather_result_ = foreach_all_gather(params_, mesh_info.shard_group(), mesh_info.shard_size(),
                                          mesh_info.shard_rank(), streams);
}

void FSDPParamGroup::wait_for_unshard() {
  if (!all_gather_result_) return;
  comm_->free_gather_buffer();
  AllGatherResult result = std::move(*all_gather_result_);
  all_gather_result_.reset();
  foreach_all_gather_copy_out(result, params_);
  for (FSDPParam& param : params_) param.to_unsharded();
  sharded_state_ = ShardedState::kUnsharded;

  Event copied_out = comm_->compute_stream().record();
  if (training_state_ == TrainingState::kForward && has_streams(device_.type())) {
    // The next group's gather is started before this buffer is needed again.
    comm_->keep_gather_buffer(std::move(result.buffer), std::move(copied_out));
  } else {
    comm_->all_gather_streams_wait(copied_out);
  }
}

void FSDPParamGroup::reshard() {
  if (training_state_ == TrainingState::kForward && settings_.post_forward_mesh_info == nullptr) {
    notify(ScheduleEventKind::kReshard, /*changed=*/false);
    return;
  }
  notify(ScheduleEventKind::kReshard, sharded_state_ != ShardedState::kSharded);
  if (training_state_ == TrainingState::kForward &&
      settings_.post_forward_mesh_info != mesh_info_) {
    to_sharded_post_forward();
  } else {
    to_sharded();
  }
}

void FSDPParamGroup::to_sharded() {
  if (sharded_state_ == ShardedState::kSharded) return;
  for (FSDPParam& param : params_) param.to_sharded();
  sharded_state_ = ShardedState::kSharded;
}

void FSDPParamGroup::to_sharded_post_forward() {
  if (sharded_state_ != ShardedState::kUnsharded) return;
  const c10::NoGradGuard no_grad;
  const FSDPMeshInfo& mesh_info = *settings_.post_forward_mesh_info;
  for (FSDPParam& param : params_) {
    param.to_sharded_post_forward(mesh_info.shard_size(), mesh_info.shard_rank());
  }
  reshard_event_ = comm_->compute_stream().record();
  sharded_state_ = ShardedState::kShardedPostForward;
}

// Parameters that stayed unsharded after an earlier forward, or a gather that nobody has used, do
// not see what an optimizer, a load or a conversion did to the sharded ones since. A write through
// data() (torch::optim::SGD does so) moves no version counter: where a step is likely, gather anew.
// What decides is the same on every rank.
bool FSDPParamGroup::may_be_stale() const {
  if (converted_) return true;
  for (const FSDPParam& param : params_) {
    if (param.changed_since_gather()) return true;
  }
  if (!post_forward_indices_.empty()) return false;  // a backward is to come first
  return reduced_since_gather_ || (gathered_before_step_ && is_unsharded());
}

void FSDPParamGroup::drop_stale_params() {
  if (!is_unsharded() && !all_gather_result_) return;
  if (may_be_stale()) {
    drop_gather();
    reshard();
    return;
  }
  for (FSDPParam& param : params_) param.sync_requires_grad();
}

// Ends a gather that nobody will use.
void FSDPParamGroup::drop_gather() noexcept {
  if (!all_gather_result_) return;
  try {
    comm_->compute_stream().wait(all_gather_result_->done);
    if (all_gather_result_->work) all_gather_result_->work->wait();
  } catch (const std::exception&) {
    // Its failure will be told by the next collective of this group, which somebody waits for.
  }
  all_gather_result_.reset();
}

bool FSDPParamGroup::pre_forward() {
  const bool entering = training_state_ != TrainingState::kForward;
  if (training_state_ == TrainingState::kIdle) drop_stale_params();
  training_state_ = TrainingState::kForward;
  unshard();
  wait_for_unshard();
  return entering;
}

void FSDPParamGroup::post_forward() {
  // A forward that is recomputed inside backward keeps its parameters: backward comes next.
  if (torch::autograd::get_current_graph_task_id() == -1) {
    reshard();
    record_post_forward();
  }
  training_state_ = TrainingState::kIdle;
}

void FSDPParamGroup::record_post_forward() {
  if (!c10::GradMode::is_enabled()) return;  // no backward will take it out again
  post_forward_indices_.push_back(comm_->post_forward_order.size());
  comm_->post_forward_order.push_back(weak_from_this());
}

std::optional<size_t> FSDPParamGroup::pop_post_forward_index() {
  if (post_forward_indices_.empty()) return std::nullopt;
  const size_t index = post_forward_indices_.back();
  post_forward_indices_.pop_back();
  return index;
}

void FSDPParamGroup::pre_backward(bool default_prefetch) {
  if (training_state_ == TrainingState::kPreBackward) return;
  training_state_ = TrainingState::kPreBackward;
  unshard();
  wait_for_unshard();
  if (default_prefetch) backward_prefetch(*this);
}

void FSDPParamGroup::prefetch(TrainingState turn) {
  const TrainingState own = training_state_;
  training_state_ = turn;
  prefetching_ = true;
  unshard();
  prefetching_ = false;
  training_state_ = own;
}

void FSDPParamGroup::post_backward() {
  const c10::NoGradGuard no_grad;
  training_state_ = TrainingState::kPostBackward;
  bool has_grads = false;
  for (FSDPParam& param : params_) {
    param.accumulate_unsharded_grad();
    has_grads = has_grads || param.has_unsharded_grad();
  }
  if (settings_.reshard_after_backward) reshard();
  if (has_grads) {
    if (settings_.reduce_grads) {
      start_reduction();
    } else {
      keep_unsharded_grads();
    }
  }
  notify(ScheduleEventKind::kPostBackward, has_grads);
}

void FSDPParamGroup::keep_unsharded_grads() {
  for (FSDPParam& param : params_) param.keep_unsharded_grad();
}

void FSDPParamGroup::start_reduction() {
  comm_->make_room_for_reduction();
  if (reduction_) {
    reduction_->finish();
    comm_->compute_stream().wait(reduction_->post_reduce());
    if (PartialOutput partial = reduction_->take_partial_output(); partial.flat.defined()) {
      partial_reduce_output_ = std::move(partial);
    }
  }
  ReduceRequest request{.mesh_info = mesh_info_,
                        .device = device_,
                        .divide_factor = settings_.gradient_divide_factor,
                        .all_reduce_grads = settings_.all_reduce_grads,
                        .partial_output = std::exchange(partial_reduce_output_, {})};
  const std::vector<FSDPParam*>& partial = request.partial_output.params;
  for (FSDPParam& param : params_) {
    const bool has_grad = param.has_unsharded_grad();
    if (!has_grad && std::find(partial.begin(), partial.end(), &param) == partial.end()) continue;
    request.params.push_back(&param);
    request.grads.push_back(has_grad ? param.take_unsharded_grad() : param.zero_unsharded_grad());
    request.orig_dtype = param.orig_dtype();
    request.reduce_dtype = param.reduce_dtype();
  }
  reduced_since_gather_ = true;
  reduction_ = std::make_shared<Reduction>(std::move(request), comm_->reduce_streams());
  comm_->add_reduction(reduction_);
  if (has_streams(device_.type())) reduction_->finish();  // work on streams; the host goes on
}

void FSDPParamGroup::finalize_backward() {
  if (reduction_) comm_->compute_stream().wait(reduction_->post_reduce());
  drop_gather();  // for a backward that did not come
  post_forward_indices_.clear();
}

void FSDPParamGroup::reset_iteration(bool drop_unsharded_grads) noexcept {
  drop_gather();
  post_forward_indices_.clear();
  if (drop_unsharded_grads) {
    partial_reduce_output_ = {};
    for (FSDPParam& param : params_) param.take_unsharded_grad().reset();
  }
  training_state_ = TrainingState::kIdle;
  to_sharded();
}

}  // namespace fsdp
