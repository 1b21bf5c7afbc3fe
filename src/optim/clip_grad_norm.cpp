#include "fsdp/optim.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/error.h"
#include "fsdp/sharded_tensor.h"
#include "mesh/work.h"

namespace fsdp {
namespace {

// The gradients, and which group the sharded ones are cut over (null: none is sharded).
struct Gradients {
  std::vector<at::Tensor> sharded;
  std::vector<at::Tensor> plain;
  ProcessGroupPtr shard_group;
};

Gradients collect_grads(const std::vector<at::Tensor>& params) {
  Gradients result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& param : params) {
    if (!seen.insert(param.unsafeGetTensorImpl()).second) continue;  // shared, under two names
    const ShardedTensorSpec* spec = spec_of(param);
    if (spec != nullptr) {
      FSDP_CHECK(ConfigError, !result.shard_group || result.shard_group == spec->shard_group(),
                 "clip_grad_norm_: parameter '", spec->fqn,
                 "' is sharded over another group than "
                 "the ones before it. Clip the parameters of each mesh on their own.");
      result.shard_group = spec->shard_group();
    }
    if (!param.grad().defined()) continue;
    (spec != nullptr ? result.sharded : result.plain).push_back(param.grad());
  }
  return result;
}

// The norm over all elements: its p-th power, so that parts can be added; the maximum for infinity.
at::Tensor norm_power(const std::vector<at::Tensor>& grads, double p, at::TensorOptions options) {
  std::vector<at::Tensor> norms{at::zeros({}, options)};
  for (const at::Tensor& grad : grads) {
    if (grad.numel() == 0) continue;
    const at::ScalarType dtype = grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    norms.push_back(at::linalg_vector_norm(grad, p, {}, /*keepdim=*/false, dtype).to(options));
  }
  const at::Tensor stacked = at::stack(norms);
  return std::isinf(p) ? stacked.max() : stacked.pow(p).sum();
}

}  // namespace

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& params, double max_norm,
                           const ClipGradNormOptions& options) {
  const double p = options.norm_type;
  FSDP_CHECK(ConfigError, p > 0, "clip_grad_norm_: norm_type must be positive, is ", p, ".");
  const c10::NoGradGuard no_grad;
  const Gradients grads = collect_grads(params);
  const bool has_double = std::any_of(params.begin(), params.end(), [](const at::Tensor& param) {
    return param.scalar_type() == at::kDouble;  // the same on every rank, gradients or not
  });
  const auto tensor_options =
      at::TensorOptions()
          .dtype(has_double ? at::kDouble : at::kFloat)
          .device(params.empty() ? c10::Device(c10::kCPU) : params.front().device());

  at::Tensor total = norm_power(grads.sharded, p, tensor_options);
  if (grads.shard_group) {
    std::vector<at::Tensor> tensors{total};
    c10d::AllreduceOptions reduce;
    reduce.reduceOp = std::isinf(p) ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    wait_for(*grads.shard_group->allreduce(tensors, reduce), *grads.shard_group,
             "all-reduce of clip_grad_norm_");
  }
  const at::Tensor plain = norm_power(grads.plain, p, tensor_options);
  total = std::isinf(p) ? at::max(total, plain) : (total + plain).pow(1.0 / p);
  FSDP_CHECK(StateError, !options.error_if_nonfinite || std::isfinite(total.item<double>()),
             "clip_grad_norm_: the total norm of the gradients is ", total.item<double>(),
             ", so they cannot be clipped. Look for an overflow in this step, or leave "
             "error_if_nonfinite out to scale by it anyway.");
  const at::Tensor scale = (max_norm / (total + 1e-6)).clamp_max(1.0);
  for (const auto* list : {&grads.sharded, &grads.plain}) {
    for (const at::Tensor& grad : *list) grad.mul_(scale);
  }
  return total;
}

}  // namespace fsdp
