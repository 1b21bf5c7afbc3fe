#include "fsdp/adamw.h"

#include <algorithm>
#include <array>
#include <unordered_set>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "fsdp/error.h"
#include "optim/adamw_kernels.h"
#include "shard/shard_range.h"
#include "shard/sharded_spec.h"
#include "shard/storage.h"

namespace fsdp {
namespace {

using torch::optim::OptimizerParamGroup;

constexpr int64_t kAlignmentBytes = 64;  // a cache line; the widest vector registers

std::string name_of(const at::Tensor& param, size_t index, size_t group) {
  return c10::str("parameter ", index, " of group ", group, ", of shape ", param.sizes(), ",");
}

void check_options(const AdamWOptions& options, const std::string& whose) {
  const auto at_least_0 = [&](const char* name, double value) {
    FSDP_CHECK(ConfigError, value >= 0, "AdamW: ", name, " of ", whose, " must be at least 0, is ",
               value, ".");
  };
  at_least_0("lr", options.lr());
  at_least_0("eps", options.eps());
  at_least_0("weight_decay", options.weight_decay());
  const auto& [beta1, beta2] = options.betas();
  FSDP_CHECK(ConfigError, 0 <= beta1 && beta1 < 1 && 0 <= beta2 && beta2 < 1, "AdamW: betas of ",
             whose, " must be at least 0 and less than 1, are ", beta1, " and ", beta2, ".");
}

// As torch merges the options of its own optimizers.
AdamWOptions merge(const AdamWOptions& group, const AdamWOptions& defaults) {
  const AdamWOptions unset;
  AdamWOptions result = defaults;
  if (group.lr() != unset.lr()) result.lr(group.lr());
  if (group.betas() != unset.betas()) result.betas(group.betas());
  if (group.eps() != unset.eps()) result.eps(group.eps());
  if (group.weight_decay() != unset.weight_decay()) result.weight_decay(group.weight_decay());
  if (group.amsgrad() != unset.amsgrad()) result.amsgrad(group.amsgrad());
  if (group.maximize() != unset.maximize()) result.maximize(group.maximize());
  return result;
}

void check_not_unsharded(const at::Tensor& param, size_t index, size_t group) {
  FSDP_CHECK(StateError, !is_unsharded_param(param), "AdamW: ", name_of(param, index, group),
             " is the unsharded parameter of a sharded module, which never has a gradient, so this "
             "optimizer would train nothing. Build the optimizer after fully_shard(), from "
             "fsdp::parameters(model).");
}

void check_grad(const at::Tensor& param, size_t index, size_t group) {
  const at::Tensor& grad = param.grad();
  if (!grad.defined()) return;
  FSDP_CHECK(ConfigError, grad.layout() == at::kStrided, "AdamW: ", name_of(param, index, group),
             " has a gradient of layout ", grad.layout(),
             ", and only dense ones are supported. Leave out sparse(true) of the embedding.");
  FSDP_CHECK(StateError,
             grad.sizes() == param.sizes() && grad.scalar_type() == param.scalar_type() &&
                 grad.device() == param.device(),
             "AdamW: ", name_of(param, index, group), " is of ", param.scalar_type(), " on ",
             param.device(), ", but its gradient is of shape ", grad.sizes(), ", of ",
             grad.scalar_type(), " on ", grad.device(), ". Call zero_grad() after a conversion.");
}

// One parameter of a step, with all that the kernel takes.
struct Update {
  at::Tensor param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step;
};

Update make_update(const at::Tensor& param, const AdamWParamState& state, bool amsgrad) {
  at::Tensor grad = param.grad();
  // The kernel pairs elements by their place in memory.
  if (grad.strides() != param.strides()) grad = at::empty_like(param).copy_(grad);
  return {.param = param,
          .grad = std::move(grad),
          .exp_avg = state.exp_avg,
          .exp_avg_sq = state.exp_avg_sq,
          .max_exp_avg_sq = amsgrad ? state.max_exp_avg_sq : at::Tensor(),
          .step = state.step};
}

// Whether the `numel` elements of the storage behind those of `tensor` (on the CPU) are zeros.
bool zeros_follow(const at::Tensor& tensor, int64_t numel) {
  const auto* end = static_cast<const char*>(tensor.const_data_ptr()) + tensor.nbytes();
  return std::all_of(end, end + numel * tensor.element_size(), [](char byte) { return byte == 0; });
}

// Whether the kernel may take the elements from those of `a` to those of `b` for one parameter: all
// tensors are equally far apart, and what lies between stays zero, whoever owns it, since it is
// zero in parameter, gradient and state. (Less than 64 bytes of state are padding: see lay_out.)
// Other devices launch one kernel for all tensors anyway.
bool can_merge(const Update& a, const Update& b, double eps) {
  if (!a.param.is_cpu() || eps == 0) return false;
  if (*a.step.const_data_ptr<float>() != *b.step.const_data_ptr<float>()) return false;
  const int64_t distance = b.exp_avg.storage_offset() - a.exp_avg.storage_offset();
  const int64_t gap = distance - a.param.numel();
  if (gap < 0 || gap * a.param.element_size() >= kAlignmentBytes) return false;
  for (const auto member : {&Update::param, &Update::grad, &Update::exp_avg, &Update::exp_avg_sq,
                            &Update::max_exp_avg_sq}) {
    if (!(a.*member).defined()) continue;  // no amsgrad
    if (!(a.*member).is_alias_of(b.*member)) return false;
    if ((b.*member).storage_offset() - (a.*member).storage_offset() != distance) return false;
  }
  return zeros_follow(a.param, gap) && zeros_follow(a.grad, gap);
}

// The tensor `member` of a run of parameters that can be merged, as one.
at::Tensor merged(const Update& first, const Update& last, at::Tensor Update::*member) {
  const at::Tensor& a = first.*member;
  const at::Tensor& b = last.*member;
  if (&a == &b) return a;
  return tensor_over(a.storage(), a.scalar_type(), a.storage_offset(),
                     {b.storage_offset() + b.numel() - a.storage_offset()});
}

void step_all(const std::vector<Update>& updates, const AdamWOptions& options) {
  AdamWLists lists;
  for (size_t begin = 0, end; begin < updates.size(); begin = end) {
    end = begin + 1;
    while (end < updates.size() && can_merge(updates[end - 1], updates[end], options.eps())) ++end;
    const Update& first = updates[begin];
    const Update& last = updates[end - 1];
    lists.params.push_back(merged(first, last, &Update::param));
    lists.grads.push_back(merged(first, last, &Update::grad));
    lists.exp_avgs.push_back(merged(first, last, &Update::exp_avg));
    lists.exp_avg_sqs.push_back(merged(first, last, &Update::exp_avg_sq));
    if (options.amsgrad()) {
      lists.max_exp_avg_sqs.push_back(merged(first, last, &Update::max_exp_avg_sq));
    }
    lists.steps.push_back(first.step);
  }
  if (has_fused_adamw(updates[0].param.device())) {
    fused_adamw(lists, options);
  } else {
    foreach_adamw(lists, options);
  }
}

// A group's parameters by dtype and device, each list in the group's order.
std::vector<std::vector<at::Tensor>> by_type(const std::vector<at::Tensor>& params) {
  std::vector<std::vector<at::Tensor>> lists;
  for (const at::Tensor& param : params) {
    const auto list = std::find_if(lists.begin(), lists.end(), [&](const auto& other) {
      return other[0].scalar_type() == param.scalar_type() && other[0].device() == param.device();
    });
    (list != lists.end() ? *list : lists.emplace_back()).push_back(param);
  }
  return lists;
}

const AdamWOptions& options_of(const OptimizerParamGroup& group) {
  return static_cast<const AdamWOptions&>(group.options());
}

constexpr std::array kStateKinds{&AdamWParamState::step, &AdamWParamState::exp_avg,
                                 &AdamWParamState::exp_avg_sq, &AdamWParamState::max_exp_avg_sq};

}  // namespace

AdamWOptions::AdamWOptions(double lr) : lr_(lr) {}

void AdamWOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(amsgrad);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(maximize);
}

void AdamWOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, amsgrad);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, maximize);
}

void AdamWParamState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", step);
  archive.write("exp_avg", exp_avg);
  archive.write("exp_avg_sq", exp_avg_sq);
  if (max_exp_avg_sq.defined()) archive.write("max_exp_avg_sq", max_exp_avg_sq);
}

void AdamWParamState::serialize(torch::serialize::InputArchive& archive) {
  archive.read("step", step);
  archive.read("exp_avg", exp_avg);
  archive.read("exp_avg_sq", exp_avg_sq);
  archive.try_read("max_exp_avg_sq", max_exp_avg_sq);
}

AdamW::AdamW(const std::vector<OptimizerParamGroup>& param_groups, const AdamWOptions& defaults)
    : Optimizer(std::vector<OptimizerParamGroup>(), std::make_unique<AdamWOptions>(defaults)) {
  check_options(defaults, "the defaults");
  FSDP_CHECK(ConfigError,
             std::any_of(param_groups.begin(), param_groups.end(),
                         [](const auto& group) { return !group.params().empty(); }),
             "AdamW: the list of parameters is empty. Pass fsdp::parameters(model).");
  for (const OptimizerParamGroup& group : param_groups) add_param_group(group);
}

AdamW::AdamW(std::vector<at::Tensor> params, const AdamWOptions& defaults)
    : AdamW(std::vector<OptimizerParamGroup>{OptimizerParamGroup(std::move(params))}, defaults) {}

void AdamW::add_param_group(const OptimizerParamGroup& param_group) {
  const size_t group = param_groups_.size();
  auto options = std::make_unique<AdamWOptions>(static_cast<const AdamWOptions&>(*defaults_));
  if (param_group.has_options()) {
    const auto* own = dynamic_cast<const AdamWOptions*>(&param_group.options());
    FSDP_CHECK(ConfigError, own != nullptr, "AdamW: the options of group ", group,
               " are those of another optimizer. Pass fsdp::AdamWOptions.");
    *options = merge(*own, *options);
  }
  check_options(*options, c10::str("group ", group));
  check_params(param_group.params(), group);
  param_groups_.emplace_back(param_group.params(), std::move(options));
}

void AdamW::check_params(const std::vector<at::Tensor>& params, size_t group) const {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const OptimizerParamGroup& other : param_groups_) {
    for (const at::Tensor& param : other.params()) seen.insert(param.unsafeGetTensorImpl());
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    check_not_unsharded(param, i, group);
    FSDP_CHECK(ConfigError, seen.insert(param.unsafeGetTensorImpl()).second,
               "AdamW: ", name_of(param, i, group),
               " is listed twice. fsdp::parameters(model) lists a shared parameter once.");
    FSDP_CHECK(ConfigError, param.is_leaf(), "AdamW: ", name_of(param, i, group),
               " is not a leaf: it was computed from others. Pass what it was computed from.");
    FSDP_CHECK(ConfigError, at::isFloatingType(param.scalar_type()),
               "AdamW: ", name_of(param, i, group), " is of ", param.scalar_type(),
               ", expected a floating-point type. Leave it out.");
    FSDP_CHECK(ConfigError, param.is_non_overlapping_and_dense(),
               "AdamW: ", name_of(param, i, group), " has strides ", param.strides(),
               ", which leave holes or overlap. Make it contiguous().");
  }
}

void AdamW::check_step() const {
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const std::vector<at::Tensor>& params = param_groups_[group].params();
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& param = params[i];
      check_not_unsharded(param, i, group);
      check_grad(param, i, group);
      const AdamWParamState* state = find_state(param);
      if (state == nullptr) continue;
      const at::Tensor& exp_avg = state->exp_avg;
      FSDP_CHECK(StateError,
                 exp_avg.sizes() == param.sizes() && exp_avg.strides() == param.strides() &&
                     exp_avg.scalar_type() == param.scalar_type() &&
                     exp_avg.device() == param.device(),
                 "AdamW: ", name_of(param, i, group), " is of ", param.scalar_type(), " on ",
                 param.device(), ", but its state is of shape ", exp_avg.sizes(), ", of ",
                 exp_avg.scalar_type(), " on ", exp_avg.device(),
                 ". It was converted or replaced after the first step: build a new optimizer.");
    }
  }
}

const AdamWParamState* AdamW::find_state(const at::Tensor& param) const {
  const auto entry = state_.find(param.unsafeGetTensorImpl());
  return entry == state_.end() ? nullptr : static_cast<const AdamWParamState*>(entry->second.get());
}

AdamWParamState& AdamW::state_of(const at::Tensor& param) {
  auto& state = state_[param.unsafeGetTensorImpl()];
  if (!state) state = std::make_unique<AdamWParamState>();
  return static_cast<AdamWParamState&>(*state);
}

// New state for those of `params`, all of one dtype and device, that lack some.
void AdamW::make_missing_state(const std::vector<at::Tensor>& params, bool amsgrad) {
  for (const StateKind kind : kStateKinds) {
    if (kind == &AdamWParamState::max_exp_avg_sq && !amsgrad) continue;
    std::vector<at::Tensor> missing;
    for (const at::Tensor& param : params) {
      const AdamWParamState* state = find_state(param);
      if (state != nullptr && (state->*kind).defined()) continue;
      if (param.requires_grad() || param.grad().defined()) missing.push_back(param);
    }
    if (!missing.empty()) lay_out(missing, kind);
  }
}

// Gives `params`, all of one dtype and device, one kind of state in a new buffer: zeros, or the
// values that they have of it.
void AdamW::lay_out(const std::vector<at::Tensor>& params, StateKind kind) {
  const bool is_step = kind == &AdamWParamState::step;
  at::TensorOptions options = params[0].options();
  if (is_step) {
    options = options.dtype(at::kFloat);
    if (!has_fused_adamw(params[0].device())) options = options.device(at::kCPU);
  }
  const auto alignment = kAlignmentBytes / static_cast<int64_t>(options.dtype().itemsize());
  std::vector<int64_t> offsets;
  int64_t numel = 0;
  for (const at::Tensor& param : params) {
    offsets.push_back(numel);
    const int64_t end = numel + (is_step ? 1 : param.numel());
    numel = round_up(end, alignment);
  }
  const at::Tensor buffer = at::zeros({numel}, options);
  for (size_t i = 0; i < params.size(); ++i) {
    const at::IntArrayRef sizes = is_step ? at::IntArrayRef() : params[i].sizes();
    const at::IntArrayRef strides = is_step ? at::IntArrayRef() : params[i].strides();
    at::Tensor& tensor = state_of(params[i]).*kind;
    const at::Tensor view = buffer.as_strided(sizes, strides, offsets[i]);
    if (tensor.defined()) view.copy_(tensor);
    const ShardedTensorSpec* spec = is_step ? nullptr : spec_of(params[i]);
    if (spec != nullptr) attach_spec(view, std::make_shared<ShardedTensorSpec>(*spec));
    tensor = view;
  }
}

at::Tensor AdamW::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const c10::AutoGradMode with_grad(/*enabled=*/true);
    loss = closure();
  }
  const c10::NoGradGuard no_grad;
  check_step();
  for (const OptimizerParamGroup& group : param_groups_) {
    for (const auto& params : by_type(group.params())) step_params(params, options_of(group));
  }
  return loss;
}

void AdamW::step_params(const std::vector<at::Tensor>& params, const AdamWOptions& options) {
  const auto has_grad = [](const at::Tensor& param) { return param.grad().defined(); };
  if (std::none_of(params.begin(), params.end(), has_grad)) return;
  make_missing_state(params, options.amsgrad());
  std::vector<at::Tensor> stepped, steps;
  std::vector<Update> updates;
  for (const at::Tensor& param : params) {
    if (!has_grad(param)) continue;
    const AdamWParamState& state = state_of(param);
    // Of an empty shard too: ranks agree on the step, and on whether parameters have changed.
    steps.push_back(state.step);
    stepped.push_back(param);
    if (param.numel() > 0) updates.push_back(make_update(param, state, options.amsgrad()));
  }
  at::_foreach_add_(steps, 1);
  if (!updates.empty()) step_all(updates, options);
  // The kernel moves no counter, and merged tensors have their own.
  for (const at::Tensor& param : stepped) param.unsafeGetTensorImpl()->bump_version();
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<AdamWParamState, AdamWOptions>(archive, *this);
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  const c10::NoGradGuard no_grad;
  AdamW loaded(param_groups_, static_cast<const AdamWOptions&>(*defaults_));
  torch::optim::serialize<AdamWParamState, AdamWOptions>(archive, loaded);
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    for (const auto& params : by_type(param_groups_[group].params())) {
      for (const StateKind kind : kStateKinds) loaded.lay_out_loaded(params, kind, group);
    }
  }
  state_ = std::move(loaded.state_);
  param_groups_ = std::move(loaded.param_groups_);
}

// Moves what was loaded into one buffer again.
void AdamW::lay_out_loaded(const std::vector<at::Tensor>& params, StateKind kind, size_t group) {
  std::vector<at::Tensor> present;
  for (const at::Tensor& param : params) {
    const AdamWParamState* state = find_state(param);
    if (state == nullptr || !(state->*kind).defined()) continue;
    const bool is_step = kind == &AdamWParamState::step;
    FSDP_CHECK(CheckpointError,
               (state->*kind).sizes() == (is_step ? at::IntArrayRef() : param.sizes()),
               "AdamW: a parameter of group ", group, " is of shape ", param.sizes(),
               ", but its saved state of shape ", (state->*kind).sizes(),
               ". It is of another model, rank or number of ranks; nothing was loaded.");
    present.push_back(param);
  }
  if (!present.empty()) lay_out(present, kind);
}

}  // namespace fsdp
