#include "reduce/reduce_scatter.h"

#include <algorithm>
#include <cmath>

#include <ATen/ops/maximum.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/range.h"
#include "fsdp/error.h"
#include "mesh/work.h"
#include "shard/storage.h"

namespace fsdp {
namespace {

bool has_premul_sum(c10d::ProcessGroup& group, c10::DeviceType device_type) {
  const std::string name = group.getBackend(device_type)->getBackendName();
  return name == "nccl" || name == "thread";
}

// Source: torch_npu 2.13, ProcessGroupHCCL: it sums, and takes the largest or smallest.
bool has_average(c10d::ProcessGroup& group, c10::DeviceType device_type) {
  return group.getBackend(device_type)->getBackendName() != "hccl";
}

c10d::ReduceOp reduce_op(ReduceKind kind, double premul) {
  switch (kind) {
    case ReduceKind::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceKind::kAverage:
      return c10d::ReduceOp::AVG;
    case ReduceKind::kPremulSum: {
      c10d::ReduceOp op;
      op.op_ = c10d::ReduceOp::PREMUL_SUM;
      op.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(premul);
      return op;
    }
  }
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace

Reduction::Reduction(ReduceRequest request, const ReduceStreams& streams)
    : layout_(std::move(request.input.layout)),
      has_grad_(std::move(request.input.has_grad)),
      group_number_(request.input.group_number),
      mesh_info_(std::move(request.mesh_info)),
      group_(request.reduce_scatter_group ? std::move(request.reduce_scatter_group)
                                          : mesh_info_->shard_group()),
      streams_(streams),
      pool_(std::move(request.input.pool)),
      module_path_(std::move(request.module_path)),
      all_reduce_grads_(request.all_reduce_grads),
      require_equal_grads_(request.require_equal_grads),
      all_reduce_hook_(std::move(request.all_reduce_hook)),
      partial_output_(std::move(request.partial_output)),
      input_(std::move(request.input.flat)) {
  FSDP_CHECK(
      StateError, !partial_output_.flat.defined() || partial_output_.layout == layout_,
      "post_backward: requires_grad of a parameter was changed between backward passes that "
      "were not all-reduced (set_requires_all_reduce(false)). Change it between steps only.");
  if (request.all_reduce_hook_stream) streams_.all_reduce = *request.all_reduce_hook_stream;
  const c10::NoGradGuard no_grad;
  start(get_gradient_divide_factors(
      {.shard_size = mesh_info_->shard_size(),
       .replicate_size = mesh_info_->replicate_size(),
       .reduce_dtype = input_.scalar_type(),
       .custom_factor = request.divide_factor,
       .force_sum = request.force_sum || !has_average(*group_, input_.device().type()),
       .has_premul_sum = has_premul_sum(*group_, input_.device().type())}));
}

void Reduction::start(const DivideFactors& factors) {
  factors_ = factors;
  streams_.reduce_scatter.wait(current_stream(input_.device()));
  const StreamGuard on_reduce_scatter(streams_.reduce_scatter);
  if (factors_.pre) input_.div_(*factors_.pre);
  if (mesh_info_->shard_size() == 1) {
    output_ = input_;
    return;
  }
  output_ = pool_->allocate(input_.numel() / mesh_info_->shard_size(), input_.scalar_type());
  if (input_.numel() == 0) return;
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op(factors_.reduce_scatter, factors_.premul);
  work_ = group_->_reduce_scatter_base(output_, input_, options);
}

Reduction::~Reduction() { release_input(); }

void Reduction::release_input() {
  if (!input_.defined()) return;
  current_stream(input_.device()).wait(reduce_scatter_done_);
  pool_->give_back(std::move(input_));
  added_partial_.reset();
}

void Reduction::finish() {
  if (finished_) return;
  finished_ = true;
  const c10::NoGradGuard no_grad;
  bool reduced = true;
  {
    const StreamGuard on_reduce_scatter(streams_.reduce_scatter);
    if (work_) wait_for(*work_, *group_, "reduce-scatter of gradients");
    work_.reset();
    reduce_scatter_done_ = streams_.reduce_scatter.record();
    if (mesh_info_->replicate_mesh_dim) reduced = all_reduce();
    if (!reduced) post_reduce_ = streams_.reduce_scatter.record();
  }
  if (!reduced) return;
  if (all_reduce_hook_) run_all_reduce_hook();
  const bool on_all_reduce = mesh_info_->replicate_mesh_dim || all_reduce_hook_;
  write_sharded_grads(on_all_reduce ? streams_.all_reduce : streams_.reduce_scatter);
}

void Reduction::abandon() noexcept {
  if (finished_) return;
  finished_ = true;
  partial_output_ = {};
  try {
    if (work_) work_->wait();
  } catch (const std::exception&) {
    // The step has failed already, perhaps by this very collective; its error has been reported.
  }
  work_.reset();
}

// Gradients add up. Of flags the larger is kept: whether any of the reductions had a gradient.
void Reduction::add_partial_output() {
  const at::Tensor& before = partial_output_.flat;
  const int64_t num_grads = layout_->flags_offset;
  output_.narrow(0, 0, num_grads).add_(before.narrow(0, 0, num_grads));
  const at::Tensor flags = output_.narrow(0, num_grads, layout_->num_flags);
  flags.copy_(at::maximum(flags, before.narrow(0, num_grads, layout_->num_flags)));
  for (size_t i = 0; i < has_grad_.size(); ++i) {
    has_grad_[i] = has_grad_[i] | partial_output_.has_grad[i];
  }
  if (mesh_info_->shard_size() == 1) {
    // It was an input, so it belongs to the compute stream: kept as long as this one's.
    added_partial_ = std::move(partial_output_.flat);
    reduce_scatter_done_ = streams_.reduce_scatter.record();
  }
  partial_output_ = {};
}

// Adds up over the replicas; false if the sum is kept for a later reduction instead.
bool Reduction::all_reduce() {
  if (require_equal_grads_) check_equal_grads();  // of this shard group, and of this backward
  if (partial_output_.flat.defined()) add_partial_output();
  if (!all_reduce_grads_) {
    partial_output_ = {.flat = output_, .layout = layout_, .has_grad = has_grad_};
    return false;
  }
  if (output_.numel() == 0) return true;
  const Range range("FSDP::all_reduce", module_path_);
  streams_.all_reduce.wait(streams_.reduce_scatter);
  const StreamGuard on_all_reduce(streams_.all_reduce);
  const ProcessGroupPtr& group = mesh_info_->mesh->get_group(*mesh_info_->replicate_mesh_dim);
  std::vector<at::Tensor> tensors{output_};
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op(factors_.all_reduce, /*premul=*/1.0);
  wait_for(*group->allreduce(tensors, options), *group, "all-reduce of gradients");
  return true;
}

// In the place of an all-reduce, or behind it. It does not see the flags behind the gradients.
void Reduction::run_all_reduce_hook() {
  streams_.all_reduce.wait(streams_.reduce_scatter);
  const StreamGuard on_all_reduce(streams_.all_reduce);
  all_reduce_hook_(output_.narrow(0, 0, layout_->flags_offset));
}

// On the host, which waits for them.
const float* Reduction::reduced_flags() {
  if (output_.is_cpu() && output_.scalar_type() == at::kFloat) {
    return output_.const_data_ptr<float>() + layout_->flags_offset;
  }
  host_flags_ =
      output_.narrow(0, layout_->flags_offset, layout_->num_flags).to(at::kCPU, at::kFloat);
  return host_flags_.const_data_ptr<float>();
}

void Reduction::check_equal_grads() {
  if (layout_->num_flags == 0) return;
  const float* flag = reduced_flags();
  for (size_t i = 0; i < has_grad_.size(); ++i) {
    const ShardedTensorSpec& spec = *layout_->slots[i].param->spec();
    FSDP_CHECK(
        StateError, flag[i] == 0 || flag[i] == flag[layout_->one_flag()],
        "post_backward: parameter ", describe(spec.fqn, spec.sizes),
        " has a gradient on some ranks only (on this one: ", has_grad_[i] != 0 ? "yes" : "no",
        "), and require_equal_gradients is set. Let every rank use the same parameters, or "
        "leave it out to count missing gradients as zeros.");
  }
}

// The flags were reduced like gradients. A device is not waited for unless this rank lacks a
// gradient that others may have.
void Reduction::look_at_other_ranks() {
  if (layout_->num_flags == 0) return;
  const bool has_all = std::find(has_grad_.begin(), has_grad_.end(), 0) == has_grad_.end();
  if (require_equal_grads_) check_equal_grads();
  if (has_all && has_streams(output_.device().type())) return;
  const float* flag = reduced_flags();
  const bool sums_exactly =
      output_.scalar_type() == at::kFloat || output_.scalar_type() == at::kDouble;
  const float number = flag[layout_->group_flag()] / flag[layout_->one_flag()];
  FSDP_CHECK(StateError,
             !sums_exactly || std::abs(number - static_cast<float>(group_number_)) < 0.01F,
             "post_backward: the gradients of the group of ",
             describe(layout_->slots.front().param->spec()->fqn,
                      layout_->slots.front().param->spec()->sizes),
             " were added to those of another group on some rank. Every rank must run the same "
             "modules, forward and backward, in the same order; if ranks use different ones, see "
             "set_reduce_scatter_unused_params().");
  for (size_t i = 0; i < has_grad_.size(); ++i) has_grad_[i] = flag[i] != 0 ? 1 : 0;
}

void Reduction::write_sharded_grads(const Stream& stream) {
  const StreamGuard on_stream(stream);
  look_at_other_ranks();
  if (factors_.post) output_.div_(*factors_.post);
  const at::ScalarType orig_dtype = layout_->flats.front()->orig_dtype();
  const at::Tensor flat = output_.scalar_type() == orig_dtype
                              ? output_
                              : output_.narrow(0, 0, layout_->flags_offset).to(orig_dtype);
  for (size_t i = 0; i < layout_->slots.size(); ++i) {
    if (has_grad_[i] == 0) continue;
    const GradSlot& slot = layout_->slots[i];
    slot.param->accept_sharded_grad(flat, slot.shard_offset);
  }
  post_reduce_ = stream.record();
}

std::shared_ptr<Reduction> foreach_reduce(ReduceRequest request, const ReduceStreams& streams) {
  const c10::DeviceType device_type = request.input.flat.device().type();
  auto reduction = std::make_shared<Reduction>(std::move(request), streams);
  if (has_streams(device_type)) reduction->finish();  // work on streams; the host goes on
  return reduction;
}

}  // namespace fsdp
