#include "reduce/reduce_scatter.h"

#include <unordered_map>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/error.h"
#include "mesh/work.h"
#include "shard/storage.h"

namespace fsdp {
namespace {

int64_t part_numel(const FSDPParam& param) {
  return c10::multiply_integers(padded_local_sizes(*param.spec()));
}

bool has_premul_sum(c10d::ProcessGroup& group, c10::DeviceType device_type) {
  const std::string name = group.getBackend(device_type)->getBackendName();
  return name == "nccl" || name == "thread";
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

// The gradients' own dtype; where they differ, the one that holds all of them.
at::ScalarType common_dtype(const std::vector<at::Tensor>& grads) {
  at::ScalarType dtype = grads.front().scalar_type();
  for (const at::Tensor& grad : grads) dtype = c10::promoteTypes(dtype, grad.scalar_type());
  return dtype;
}

}  // namespace

Reduction::Reduction(ReduceRequest request, const ReduceStreams& streams)
    : params_(std::move(request.params)),
      mesh_info_(std::move(request.mesh_info)),
      streams_(streams),
      orig_dtype_(request.orig_dtype),
      all_reduce_grads_(request.all_reduce_grads),
      partial_output_(std::move(request.partial_output)) {
  TORCH_INTERNAL_ASSERT(!params_.empty() && params_.size() == request.grads.size());
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i) {
    FSDP_CHECK(ConfigError, request.grads[i].layout() == at::kStrided,
               "post_backward: the gradient of ",
               describe(params_[i]->spec()->fqn, params_[i]->spec()->sizes),
               " is sparse, and only dense gradients can be reduced. Build the embedding with "
               "sparse(false).");
  }
  const at::ScalarType dtype = request.reduce_dtype.value_or(common_dtype(request.grads));
  const int64_t shard_size = mesh_info_->shard_size();
  int64_t rank_numel = 0;
  for (const FSDPParam* param : params_) rank_numel += part_numel(*param);
  input_ =
      at::empty({rank_numel * shard_size}, at::TensorOptions().device(request.device).dtype(dtype));
  copy_in(request.grads);
  request.grads.clear();
  start(get_gradient_divide_factors(
      {.shard_size = shard_size,
       .replicate_size = mesh_info_->replicate_size(),
       .reduce_dtype = dtype,
       .custom_factor = request.divide_factor,
       .has_premul_sum = has_premul_sum(*mesh_info_->shard_group(), request.device.type())}));
}

// Row r of the input: the parts of rank r, one parameter after the other.
void Reduction::copy_in(const std::vector<at::Tensor>& grads) {
  if (input_.numel() == 0) return;
  const at::Tensor rows = input_.view({mesh_info_->shard_size(), -1});
  int64_t offset = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    const int64_t numel = part_numel(*params_[i]);
    copy_whole_to_parts(*params_[i]->spec(), grads[i], rows.narrow(1, offset, numel));
    offset += numel;
  }
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
  output_ = at::empty({input_.numel() / mesh_info_->shard_size()}, input_.options());
  if (input_.numel() == 0) return;
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op(factors_.reduce_scatter, factors_.premul);
  work_ = mesh_info_->shard_group()->_reduce_scatter_base(output_, input_, options);
}

Reduction::~Reduction() { release_input(); }

void Reduction::release_input() {
  if (!input_.defined()) return;
  current_stream(input_.device()).wait(reduce_scatter_done_);
  input_.reset();
}

void Reduction::finish() {
  if (finished_) return;
  finished_ = true;
  const c10::NoGradGuard no_grad;
  bool reduced = true;
  {
    const StreamGuard on_reduce_scatter(streams_.reduce_scatter);
    if (work_) wait_for(*work_, *mesh_info_->shard_group(), "reduce-scatter of gradients");
    work_.reset();
    reduce_scatter_done_ = streams_.reduce_scatter.record();
    if (mesh_info_->replicate_mesh_dim) reduced = all_reduce();
    if (!reduced) post_reduce_ = streams_.reduce_scatter.record();
  }
  if (reduced) {
    write_sharded_grads(mesh_info_->replicate_mesh_dim ? streams_.all_reduce
                                                       : streams_.reduce_scatter);
  }
}

void Reduction::abandon() noexcept {
  if (finished_) return;
  finished_ = true;
  try {
    if (work_) work_->wait();
  } catch (const std::exception&) {
    // The step has failed already, perhaps by this very collective; its error has been reported.
  }
  work_.reset();
}

void Reduction::add_partial_output() {
  if (!partial_output_.flat.defined()) return;
  std::unordered_map<const FSDPParam*, int64_t> offset_of;
  int64_t offset = 0;
  for (const FSDPParam* param : params_) {
    offset_of[param] = offset;
    offset += part_numel(*param);
  }
  offset = 0;
  for (const FSDPParam* param : partial_output_.params) {
    const int64_t numel = part_numel(*param);
    output_.narrow(0, offset_of.at(param), numel)
        .add_(partial_output_.flat.narrow(0, offset, numel));
    offset += numel;
  }
  partial_output_ = {};
}

// Adds up over the replicas; false if the sum is kept for a later reduction instead.
bool Reduction::all_reduce() {
  add_partial_output();
  if (!all_reduce_grads_) {
    partial_output_ = {.flat = output_, .params = params_};
    return false;
  }
  if (output_.numel() == 0) return true;
  streams_.all_reduce.wait(streams_.reduce_scatter);
  const StreamGuard on_all_reduce(streams_.all_reduce);
  const ProcessGroupPtr& group = mesh_info_->mesh->get_group(*mesh_info_->replicate_mesh_dim);
  std::vector<at::Tensor> tensors{output_};
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op(factors_.all_reduce, /*premul=*/1.0);
  wait_for(*group->allreduce(tensors, options), *group, "all-reduce of gradients");
  return true;
}

void Reduction::write_sharded_grads(const Stream& stream) {
  const StreamGuard on_stream(stream);
  if (factors_.post) output_.div_(*factors_.post);
  const at::Tensor flat = output_.to(orig_dtype_);
  int64_t offset = 0;
  for (FSDPParam* param : params_) {
    param->accept_sharded_grad(
        tensor_over(flat.storage(), orig_dtype_, offset, local_sizes(*param->spec())));
    offset += part_numel(*param);
  }
  post_reduce_ = stream.record();
}

}  // namespace fsdp
