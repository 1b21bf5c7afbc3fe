#include "schedule/fsdp_param_group.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "base/range.h"
#include "fsdp/error.h"
#include "schedule/prefetch.h"

namespace fsdp {

namespace {

// Takes a parameter's gradient as soon as autograd has it, and leaves none with the parameter.
class TakeGrad final : public torch::autograd::PostAccumulateGradHook {
 public:
  TakeGrad(std::weak_ptr<GradBuffer> grads, size_t index)
      : grads_(std::move(grads)), index_(index) {}

  void operator()(const at::Tensor& param) override {
    const std::shared_ptr<GradBuffer> grads = grads_.lock();
    if (!grads) return;  // the group is gone; a graph that outlived it still ran
    const at::Tensor grad = std::move(param.mutable_grad());
    if (grad.defined()) grads->add(index_, grad);
  }

 private:
  std::weak_ptr<GradBuffer> grads_;
  size_t index_;
};

}  // namespace

FSDPParamGroup::FSDPParamGroup(const std::vector<ParamToShard>& params, FSDPMeshInfoPtr mesh_info,
                               Layout layout, c10::Device device, GroupSettings settings)
    : sharded_params_(params, *mesh_info, layout, device),
      mesh_info_(std::move(mesh_info)),
      device_(device),
      settings_(std::move(settings)),
      comm_(std::make_shared<CommContext>(device)),
      grads_(
          std::make_shared<GradBuffer>(sharded_params_, mesh_info_->shard_size(),
                                       mesh_info_->shard_size() * mesh_info_->replicate_size())) {
  sharded_params_.set_pool(comm_->pool());
  if (sharded_params_.layout() == Layout::kFlat) collect_grads_as_they_come();
}

void FSDPParamGroup::collect_grads_as_they_come() {
  for (size_t i = 0; i < params().size(); ++i) {
    torch::autograd::impl::set_post_acc_grad_hooks(params()[i].unsharded_param(),
                                                   std::make_unique<TakeGrad>(grads_, i));
  }
}

void FSDPParamGroup::lazy_init() {
  if (sharded_state() != ShardedState::kSharded) return;
  check_sharded_params();
  check_uniform_dtype();
  sharded_params_.init_dtypes(settings_.mp_policy);
}

void FSDPParamGroup::join_root(const std::vector<std::string>& module_paths, int64_t number,
                               std::shared_ptr<CommContext> comm) {
  number_ = number;
  is_list_ = module_paths.size() > 1;
  module_path_.clear();
  for (const std::string& path : module_paths) {
    module_path_ += (module_path_.empty() ? "" : ", ") + path;
  }
  comm_ = std::move(comm);
  sharded_params_.set_pool(comm_->pool());
  sharded_params_.set_fqns(module_paths);
  if (has_streams(device_.type())) return;  // there a reduction is finished when it was started
  grads_->set_before_allocation([comm = std::weak_ptr<CommContext>(comm_)] {
    if (const auto alive = comm.lock()) alive->finish_ready_reductions();
  });
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
// shard without a word. Every gather looks first, so that no step runs with old weights. The
// compute stream copies them back: behind a gather that still reads the shard, and ahead of the
// next.
void FSDPParamGroup::take_back_sharded_params() {
  if (sharded_params_.are_in_place()) return;
  if (all_gather_result_) {
    if (all_gather_result_->work) all_gather_result_->work->wait();
    comm_->compute_stream().wait(all_gather_result_->done);
  }
  sharded_params_.take_back_sharded_params();
  comm_->all_gather_streams_wait(comm_->compute_stream().record());
  converted_ = true;
}

void FSDPParamGroup::check_sharded_params() {
  take_back_sharded_params();
  if (!converted_) return;
  check_uniform_dtype();
  FSDP_CHECK(
      StateError,
      sharded_state() == ShardedState::kSharded && training_state_ != TrainingState::kPreBackward,
      "unshard: the parameters of module '", module_path_,
      "' were converted or loaded between a forward and its backward. Do so before the "
      "forward, or after the optimizer's step.");
  sharded_params_.init_dtypes(settings_.mp_policy);
  converted_ = false;
}

void FSDPParamGroup::check_uniform_dtype() const {
  const FSDPParam* first = nullptr;
  for (const FSDPParam& param : sharded_params_.params()) {
    if (!param.sharded_param().requires_grad()) continue;
    if (first == nullptr) first = &param;
    const at::ScalarType dtype = param.sharded_param().scalar_type();
    const at::ScalarType expected = first->sharded_param().scalar_type();
    FSDP_CHECK(ConfigError, dtype == expected, "fully_shard: the trainable parameters of module '",
               module_path_, "' have different dtypes: '", first->spec()->fqn, "' is ", expected,
               ", '", param.spec()->fqn, "' is ", dtype,
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
  for (FSDPParam& param : params()) param.check_in_place();
  gathered_before_step_ = false;
  reduced_since_gather_ = false;
  for (FSDPParam& param : params()) {
    param.note_gather();
    gathered_before_step_ = gathered_before_step_ || param.sharded_param().grad().defined();
  }
  start_all_gather(async_op);
}

void FSDPParamGroup::start_all_gather(bool async_op) {
  const Range range("FSDP::all_gather", module_path_);
  const bool overlaps = !async_op && (training_state_ == TrainingState::kForward ||
                                      training_state_ == TrainingState::kPreBackward);
  const Stream compute = comm_->compute_stream();
  const AllGatherStreams streams =
      overlaps ? comm_->all_gather_streams()
               : AllGatherStreams{.copy_in = compute, .all_gather = compute};
  const FSDPMeshInfo& mesh_info = sharded_state() == ShardedState::kShardedPostForward
                                      ? *settings_.post_forward_mesh_info
                                      : *mesh_info_;
  all_gather_result_ =
      foreach_all_gather(sharded_params_, mesh_info.shard_group(), async_op, streams);
}

void FSDPParamGroup::wait_for_unshard() {
  if (!all_gather_result_) return;
  comm_->free_gathered();
  AllGatherResult result = std::move(*all_gather_result_);
  all_gather_result_.reset();
  {
    const Range range("FSDP::all_gather_copy_out", module_path_);
    foreach_all_gather_copy_out(result, sharded_params_);
  }
  to_unsharded();
  if (!result.buffer.defined()) return;

  const at::Storage& buffer = result.buffer.storage();
  free_gathered(buffer.set_data_ptr(at::DataPtr(nullptr, buffer.device())), buffer.nbytes());
}

// Whether bytes that are free now are likely to serve another gather of this step. After its
// backward the next group's has begun already.
bool FSDPParamGroup::gathers_follow() const {
  if (settings_.post_forward_mesh_info == nullptr) return false;
  if (training_state_ == TrainingState::kPreBackward) return place_in_backward_ >= 1;
  return training_state_ != TrainingState::kPostBackward || place_in_backward_ >= 2;
}

// Bytes of the all-gather streams, whose last use is what compute does now. In forward the next
// group's gather is not known yet; when it is started it should not wait for this group.
void FSDPParamGroup::free_gathered(at::DataPtr bytes, size_t num_bytes) {
  if (!bytes) return;
  if (!has_streams(device_.type())) {
    if (gathers_follow()) comm_->pool()->give_back(std::move(bytes), num_bytes);
    return;
  }
  Event last_use = comm_->compute_stream().record();
  if (training_state_ == TrainingState::kForward) {
    comm_->keep_gathered(std::move(bytes), std::move(last_use));
  } else {
    comm_->all_gather_streams_wait(last_use);
  }
}

void FSDPParamGroup::reshard() {
  if (training_state_ == TrainingState::kForward && settings_.post_forward_mesh_info == nullptr) {
    notify(ScheduleEventKind::kReshard, /*changed=*/false);
    return;
  }
  notify(ScheduleEventKind::kReshard, sharded_state() != ShardedState::kSharded);
  if (is_unsharded()) {
    for (FSDPParam& param : params()) param.check_not_written();
  }
  if (training_state_ == TrainingState::kForward &&
      settings_.post_forward_mesh_info != mesh_info_) {
    to_sharded_post_forward();
  } else {
    to_sharded();
  }
}

void FSDPParamGroup::to_sharded() {
  if (sharded_state() == ShardedState::kSharded) return;
  free_gathered(sharded_params_.to_sharded(), sharded_params_.storage().nbytes());
}

void FSDPParamGroup::to_sharded_post_forward() {
  if (!is_unsharded()) return;
  TORCH_INTERNAL_ASSERT(settings_.post_forward_mesh_info != nullptr);
  free_gathered(sharded_params_.to_sharded_post_forward(*settings_.post_forward_mesh_info),
                sharded_params_.storage().nbytes());
  reshard_event_ = comm_->compute_stream().record();
}

void FSDPParamGroup::to_unsharded() {
  sharded_params_.to_unsharded();
  was_unsharded_ = true;
}

// Parameters that stayed unsharded after an earlier forward, or a gather that nobody has used, do
// not see what an optimizer, a load or a conversion did to the sharded ones since. A write through
// data() (torch::optim::SGD does so) moves no version counter: where a step is likely, gather anew.
// What decides is the same on every rank.
bool FSDPParamGroup::may_be_stale() const {
  if (converted_) return true;
  for (const FSDPParam& param : sharded_params_.params()) {
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
  for (FSDPParam& param : params()) param.sync_requires_grad();
}

// Ends a gather that nobody will use.
void FSDPParamGroup::drop_gather() noexcept {
  if (!all_gather_result_) return;
  const bool is_flat = sharded_params_.layout() == Layout::kFlat;
  try {
    comm_->compute_stream().wait(all_gather_result_->done);
    if (all_gather_result_->work) all_gather_result_->work->wait();
    if (is_flat) sharded_params_.drop_gathered();
  } catch (const std::exception&) {
    // Its failure will be told by the next collective of this group, which somebody waits for.
    if (is_flat) sharded_params_.abandon_gathered();
  }
  all_gather_result_.reset();
}

bool FSDPParamGroup::pre_forward() {
  const Range range("FSDP::pre_forward", module_path_);
  const bool entering = training_state_ != TrainingState::kForward;
  if (training_state_ == TrainingState::kIdle) drop_stale_params();
  training_state_ = TrainingState::kForward;
  for (FSDPParam& param : params()) param.admit_gradients();
  unshard();
  wait_for_unshard();
  return entering;
}

void FSDPParamGroup::post_forward() {
  const Range range("FSDP::post_forward", module_path_);
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
  const Range range("FSDP::pre_backward", module_path_);
  training_state_ = TrainingState::kPreBackward;
  place_in_backward_ = post_forward_indices_.empty() ? 0 : post_forward_indices_.back();
  for (FSDPParam& param : params()) param.admit_gradients();
  unshard();
  wait_for_unshard();
  if (default_prefetch) backward_prefetch(*this);
}

void FSDPParamGroup::prefetch(TrainingState turn) {
  const Range range(
      turn == TrainingState::kForward ? "FSDP::forward_prefetch" : "FSDP::backward_prefetch",
      module_path_, /*before_path=*/" for ", /*after_path=*/"");
  const TrainingState own = training_state_;
  training_state_ = turn;
  prefetching_ = true;
  unshard();
  prefetching_ = false;
  training_state_ = own;
}

void FSDPParamGroup::post_backward() {
  const c10::NoGradGuard no_grad;
  const bool forward_is_incomplete = training_state_ == TrainingState::kForward;
  training_state_ = TrainingState::kPostBackward;
  {
    const Range range("FSDP::post_backward_accumulate", module_path_);
    for (FSDPParam& param : params()) {
      param.admit_gradients();
      param.accumulate_unsharded_grad();
    }
  }
  const bool has_grads =
      has_unsharded_grads() || (settings_.all_reduce_grads && has_partial_output()) ||
      (settings_.reduce_scatter_unused_params && settings_.reduce_grads && may_get_grads());
  if (settings_.reshard_after_backward) {
    const Range range("FSDP::post_backward_reshard", module_path_);
    reshard();
  }
  if (has_grads) {
    if (settings_.reduce_grads) {
      start_reduction();
      if (forward_is_incomplete) end_reduction();
    } else {
      keep_unsharded_grads();
    }
  }
  notify(ScheduleEventKind::kPostBackward, has_grads);
}

bool FSDPParamGroup::has_unsharded_grads() const {
  const auto& params = sharded_params_.params();
  return grads_->has_grads() ||
         std::any_of(params.begin(), params.end(),
                     [](const FSDPParam& param) { return param.has_unsharded_grad(); });
}

bool FSDPParamGroup::has_unreduced_grads() const {
  return settings_.reduce_grads && has_unsharded_grads();
}

void FSDPParamGroup::keep_unsharded_grads() {
  const at::ScalarType dtype = sharded_params_.reduce_dtype();
  for (FSDPParam& param : params()) param.keep_unsharded_grad(dtype);
}

// kPerParameter. In the flat layout the hooks have done so.
void FSDPParamGroup::take_unsharded_grads() {
  for (size_t i = 0; i < params().size(); ++i) {
    if (params()[i].has_unsharded_grad()) grads_->add(i, params()[i].take_unsharded_grad());
  }
}

// HSDP: whether an earlier backward left a sum that is not all-reduced yet.
bool FSDPParamGroup::has_partial_output() const {
  return partial_reduce_output_.flat.defined() || (reduction_ && reduction_->has_partial_output());
}

// Whether a rank that ran another branch may have gradients where this one has none.
bool FSDPParamGroup::may_get_grads() const {
  const auto& params = sharded_params_.params();
  return was_unsharded_ && std::any_of(params.begin(), params.end(), [](const FSDPParam& param) {
           return param.sharded_param().requires_grad();
         });
}

void FSDPParamGroup::start_reduction() {
  {
    const Range range("FSDP::post_backward_rs_wait", module_path_);
    comm_->make_room_for_reduction();
    end_reduction();
  }
  const Range range("FSDP::post_backward_reduce", module_path_);
  take_unsharded_grads();
  ReduceRequest request{.input = grads_->take(settings_.reduce_scatter_unused_params, number_),
                        .mesh_info = mesh_info_,
                        .reduce_scatter_group = settings_.reduce_scatter_group,
                        .divide_factor = settings_.gradient_divide_factor,
                        .force_sum = settings_.force_sum_reduction,
                        .all_reduce_hook = settings_.all_reduce_hook,
                        .all_reduce_hook_stream = settings_.all_reduce_hook_stream,
                        .all_reduce_grads = settings_.all_reduce_grads,
                        .require_equal_grads = settings_.require_equal_gradients,
                        .partial_output = std::exchange(partial_reduce_output_, {}),
                        .module_path = module_path_};
  reduced_since_gather_ = true;
  reduction_ = foreach_reduce(std::move(request), comm_->reduce_streams());
  comm_->add_reduction(reduction_);
}

void FSDPParamGroup::leave_backward() {
  training_state_ = TrainingState::kIdle;
  if (is_list_) return;  // a module of the list may still get gradients, with no word before
  for (FSDPParam& param : params()) param.refuse_optimizers();
}

// The sharded gradients are views of a reduction's output: from here on they alone hold it.
void FSDPParamGroup::end_reduction() {
  if (!reduction_) return;
  reduction_->finish();
  comm_->compute_stream().wait(reduction_->post_reduce());
  if (reduction_->has_partial_output()) {
    partial_reduce_output_ = reduction_->take_partial_output();
  }
  reduction_.reset();
}

void FSDPParamGroup::finalize_backward() {
  end_reduction();
  drop_gather();  // for a backward that did not come
  post_forward_indices_.clear();
}

std::string FSDPParamGroup::describe() const {
  const auto name_of = [](const std::optional<at::ScalarType>& dtype) {
    return dtype ? c10::toString(*dtype) : "-";
  };
  std::ostringstream text;
  for (const FSDPParam& param : sharded_params_.params()) {
    const ShardedTensorSpec& spec = *param.spec();
    text << "'" << spec.fqn << "' " << at::IntArrayRef(spec.sizes) << " " << spec.dtype
         << (param.sharded_param().requires_grad() ? "" : " frozen") << " of group '"
         << module_path_ << "'"
         << (sharded_params_.layout() == Layout::kFlat ? " flat" : " per parameter") << " dim "
         << spec.shard_dim << " param_dtype " << name_of(settings_.mp_policy.param_dtype)
         << " reduce_dtype " << name_of(settings_.mp_policy.reduce_dtype) << "\n";
  }
  return text.str();
}

void FSDPParamGroup::reset_iteration(bool drop_unsharded_grads) noexcept {
  drop_gather();
  post_forward_indices_.clear();
  if (drop_unsharded_grads) {
    partial_reduce_output_ = {};
    grads_->clear();
    for (FSDPParam& param : params()) param.take_unsharded_grad().reset();
  }
  training_state_ = TrainingState::kIdle;
  to_sharded();
}

}  // namespace fsdp
