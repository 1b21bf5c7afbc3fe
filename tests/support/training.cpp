#include "support/training.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"

namespace fsdp::testing {
namespace {

std::unique_ptr<torch::optim::Optimizer> make_optimizer(OptimizerKind kind,
                                                        std::vector<at::Tensor> params) {
  if (kind == OptimizerKind::kAdamW) {
    return std::make_unique<torch::optim::AdamW>(std::move(params),
                                                 torch::optim::AdamWOptions(3e-3));
  }
  return std::make_unique<torch::optim::SGD>(std::move(params),
                                             torch::optim::SGDOptions(0.1).momentum(0.9));
}

}  // namespace

Transformer make_model(const TransformerOptions& options, uint64_t seed) {
  Transformer model(options);
  init_parameters(*model, seed);
  return model;
}

void shard_blocks_and_root(Transformer& model, const FullyShardOptions& options) {
  for (auto& block : model->blocks) fully_shard(*block, options);
  fully_shard(*model, options);
}

at::Tensor batch_of_step(const TrainingOptions& options, int step) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(1000 + step);
  // Half of the vocabulary only, in runs: something to learn in ten steps.
  const at::Tensor start =
      at::randint(0, options.model.vocab_size / 2, {options.batch_size, 1}, generator, at::kLong);
  const at::Tensor steps =
      at::randint(0, 2, {options.batch_size, options.seq_len}, generator, at::kLong);
  return at::cat({start, start + steps.cumsum(1)}, 1).remainder(options.model.vocab_size);
}

at::Tensor loss_of(Transformer& model, const at::Tensor& tokens) {
  const int64_t length = tokens.size(1) - 1;
  const at::Tensor logits = model(tokens.narrow(1, 0, length));
  return at::cross_entropy_loss(logits.flatten(0, 1), tokens.narrow(1, 1, length).flatten());
}

double mean_over_ranks(double value, const ProcessGroupPtr& group) {
  if (!group) return value;
  std::vector<at::Tensor> tensors{at::full({1}, value, at::kDouble)};
  group->allreduce(tensors)->wait();
  return tensors[0].item<double>() / group->getSize();
}

TrainingLog train(const TrainingOptions& options, const ProcessGroupPtr& group,
                  const std::function<void(Transformer&)>& shard) {
  Transformer model = make_model(options.model);
  shard(model);
  const auto optimizer = make_optimizer(options.optimizer, parameters(*model));
  const int64_t world_size = group ? group->getSize() : 1;
  const int64_t local_batch = options.batch_size / world_size;
  const int64_t first = group ? local_batch * group->getRank() : 0;

  TrainingLog log;
  for (const auto& entry : model->named_parameters()) log.names.push_back(entry.key());
  for (int step = 0; step < options.num_steps; ++step) {
    const at::Tensor loss =
        loss_of(model, batch_of_step(options, step).narrow(0, first, local_batch));
    loss.backward();
    log.losses.push_back(mean_over_ranks(loss.item<double>(), group));
    if (step == 0 || step == options.num_steps - 1) {
      auto& grads = log.whole_grads.emplace_back();
      for (const at::Tensor& param : model->parameters()) {
        grads.push_back(full_tensor(param.grad()).clone());
      }
    }
    optimizer->step();
    optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
  }
  for (const at::Tensor& param : model->parameters()) {
    log.whole_params.push_back(full_tensor(param).detach().clone());
  }
  return log;
}

}  // namespace fsdp::testing
