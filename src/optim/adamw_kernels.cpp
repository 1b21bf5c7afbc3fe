#include "optim/adamw_kernels.h"

#include <cmath>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/core/TensorOptions.h>

namespace fsdp {

bool has_fused_adamw(c10::Device device) {
  // Without a kernel of its own a device may fall back on the CPU's, with copies there and back.
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("aten::_fused_adamw_", "")
      .hasKernelForDispatchKey(c10::computeDispatchKey(at::kFloat, at::kStrided, device));
}

void fused_adamw(const AdamWLists& lists, const AdamWOptions& options) {
  const auto& [beta1, beta2] = options.betas();
  at::_fused_adamw_(lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs,
                    lists.max_exp_avg_sqs, lists.steps, options.lr(), beta1, beta2,
                    options.weight_decay(), options.eps(), options.amsgrad(), options.maximize());
}

void foreach_adamw(const AdamWLists& lists, const AdamWOptions& options) {
  const auto& [beta1, beta2] = options.betas();
  std::vector<at::Scalar> step_sizes, bias_corrections;
  for (const at::Tensor& step : lists.steps) {
    const double count = step.item<float>();
    step_sizes.emplace_back(-options.lr() / (1 - std::pow(beta1, count)));
    bias_corrections.emplace_back(std::sqrt(1 - std::pow(beta2, count)));
  }
  const std::vector<at::Tensor> grads =
      options.maximize() ? at::_foreach_neg(lists.grads) : lists.grads;
  if (options.weight_decay() != 0) {
    at::_foreach_mul_(lists.params, 1 - options.lr() * options.weight_decay());
  }
  at::_foreach_lerp_(lists.exp_avgs, grads, 1 - beta1);
  at::_foreach_mul_(lists.exp_avg_sqs, beta2);
  at::_foreach_addcmul_(lists.exp_avg_sqs, grads, grads, 1 - beta2);
  if (options.amsgrad()) at::_foreach_maximum_(lists.max_exp_avg_sqs, lists.exp_avg_sqs);
  const std::vector<at::Tensor> denominators =
      at::_foreach_sqrt(options.amsgrad() ? lists.max_exp_avg_sqs : lists.exp_avg_sqs);
  at::_foreach_div_(denominators, bias_corrections);
  at::_foreach_add_(denominators, options.eps());
  at::_foreach_addcdiv_(lists.params, lists.exp_avgs, denominators, step_sizes);
}

}  // namespace fsdp
