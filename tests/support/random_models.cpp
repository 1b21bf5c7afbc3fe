#include "support/random_models.h"

#include <cmath>
#include <memory>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"

// [Note: well-conditioned models]
// Two orders of summation differ by 1e-7, and a test to 1e-5 must not blow that up. So activations
// are smooth (relu jumps at 0), the norm's epsilon is 0.1 (two equal inputs have no variance), and
// so is AdamW's (it would turn a gradient of 1e-9, which is rounding, into a full step).

namespace fsdp::testing {
namespace {

constexpr double kNormEpsilon = 0.1;
constexpr double kAdamEpsilon = 0.1;

}  // namespace

RandomBlockImpl::RandomBlockImpl(const BlockPlan& p, at::ScalarType dtype) : plan(p) {
  const int64_t inputs = plan.widths.front();
  const int64_t outputs = plan.widths.back();
  const auto add_linear = [&](int64_t from, int64_t to) {
    const auto options = torch::nn::LinearOptions(from, to).bias(plan.bias);
    linears.push_back(
        register_module("linear" + std::to_string(linears.size()), fsdp::nn::Linear(options)));
  };
  switch (plan.kind) {
    case BlockKind::kLinearStack:
    case BlockKind::kMlp:
    case BlockKind::kResidual:
      for (size_t i = 0; i + 1 < plan.widths.size(); ++i) {
        add_linear(plan.widths[i], plan.widths[i + 1]);
      }
      break;
    case BlockKind::kBranches:
      add_linear(inputs, outputs);
      add_linear(inputs, outputs);
      break;
    case BlockKind::kLayerNorm:
      norm = register_module(
          "norm", fsdp::nn::LayerNorm(torch::nn::LayerNormOptions({inputs}).eps(kNormEpsilon)));
      break;
    case BlockKind::kBareParams:
      row_I = register_parameter("row", at::empty({inputs}));
      cube_D1I = register_parameter("cube", at::empty({plan.depth, 1, inputs}));
      break;
    case BlockKind::kScale:
      scale_1 = register_parameter("scale", at::empty({1}));
      break;
    case BlockKind::kNoParameters:
      break;
  }
  to(dtype);
  if (plan.frozen_dtype) {
    frozen_O = register_parameter("frozen", at::empty({outputs}, *plan.frozen_dtype),
                                  /*requires_grad=*/false);
  }
}

at::Tensor RandomBlockImpl::compute(const at::Tensor& x_BI) {
  switch (plan.kind) {
    case BlockKind::kLinearStack: {
      at::Tensor y = x_BI;
      for (auto& linear : linears) y = linear(y);
      return y;
    }
    case BlockKind::kMlp:
      return linears[1](at::gelu(linears[0](x_BI)));
    case BlockKind::kResidual:
      return x_BI + linears[1](at::tanh(linears[0](x_BI)));
    case BlockKind::kLayerNorm:
      return norm(x_BI);
    case BlockKind::kBranches:
      return at::tanh(linears[0](x_BI)) + linears[1](x_BI);
    case BlockKind::kBareParams:
      return x_BI * row_I + at::tanh(x_BI * cube_D1I).mean(0);
    case BlockKind::kScale:
      return x_BI * scale_1;
    case BlockKind::kNoParameters:
      return at::tanh(x_BI);
  }
  TORCH_INTERNAL_ASSERT(false);
}

at::Tensor RandomBlockImpl::forward(const at::Tensor& x_BI) {
  const at::Tensor y_BO = compute(x_BI);
  return frozen_O.defined() ? y_BO * frozen_O.to(y_BO.scalar_type()) : y_BO;
}

RandomStageImpl::RandomStageImpl(std::vector<RandomBlock> stage_blocks)
    : blocks(std::move(stage_blocks)) {
  for (size_t i = 0; i < blocks.size(); ++i) register_module(std::to_string(i), blocks[i]);
}

at::Tensor RandomStageImpl::forward(const at::Tensor& x_BI, const Turn& turn) {
  at::Tensor x = x_BI;
  for (RandomBlock& block : blocks) {
    const Use use = block->plan.use;
    if (use == Use::kNever || (use == Use::kOddSteps && turn.step % 2 == 0) ||
        (use == Use::kFirstMicrobatch && turn.microbatch > 0)) {
      continue;
    }
    at::Tensor y = block(x);
    if (block->plan.called_twice) y = block(y);
    if (use != Use::kDropped) x = y;
  }
  return x;
}

RandomModelImpl::RandomModelImpl(const ModelPlan& p) : plan(p) {
  if (plan.vocab_size) {
    embedding =
        register_module("embedding", fsdp::nn::Embedding(*plan.vocab_size, plan.input_width()));
    embedding->to(plan.dtype());
  }
  for (const BlockPlan& block : plan.blocks) blocks.emplace_back(block, plan.dtype());
  auto next = blocks.begin();
  for (const StagePlan& stage : plan.stages) {
    const auto end = next + static_cast<int64_t>(stage.num_blocks);
    stages.emplace_back(std::vector<RandomBlock>(next, end));
    register_module("stage" + std::to_string(stages.size() - 1), stages.back());
    next = end;
  }
  const auto head_options =
      torch::nn::LinearOptions(plan.blocks.back().widths.back(), plan.head_width)
          .bias(plan.head_bias);
  head = register_module("head", fsdp::nn::Linear(head_options));
  head->to(plan.dtype());
}

at::Tensor RandomModelImpl::forward(const at::Tensor& input, const Turn& turn) {
  at::Tensor x = embedding ? embedding(input) : input;
  for (size_t i = 0; i < stages.size(); ++i) {
    x = stages[i](x, turn);
    if (plan.stages[i].called_twice) x = stages[i](x, turn);
  }
  return head(x);
}

namespace {

// Linears shrink what they get a little, so that deep models neither blow up nor lose gradients.
// torch's own initialisation draws from the generator of the process, which rank threads share.
void init_weights(RandomModel& model, uint64_t seed) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const c10::NoGradGuard no_grad;
  for (const auto& entry : model->named_parameters()) {
    const at::Tensor& param = entry.value();
    const bool is_bias = entry.key().ends_with("bias");
    const bool is_weight = param.dim() == 2;
    const double mean = is_bias || is_weight ? 0 : 1;
    const double range = is_weight ? 1.4 / std::sqrt(static_cast<double>(param.size(1))) : 0.3;
    param.copy_((at::rand(param.sizes(), generator, at::kDouble) * 2 - 1) * range + mean);
  }
}

void freeze(torch::nn::Module& module, Freeze freeze) {
  if (freeze == Freeze::kNone) return;
  int64_t index = 0;
  for (at::Tensor& param : module.parameters()) {
    if (freeze == Freeze::kAll || index++ % 2 == 0) param.set_requires_grad(false);
  }
}

}  // namespace

RandomModel build(const ModelPlan& plan) {
  RandomModel model(plan);
  for (const TiePlan& tie : plan.ties) {
    auto& linear = model->blocks[tie.block]->linears.front();
    auto& other = model->blocks[tie.other_block]->linears.front();
    fsdp::tie(*linear, linear->weight, *other, other->weight);
  }
  if (plan.head_tied) {
    fsdp::tie(*model->embedding, model->embedding->weight, *model->head, model->head->weight);
  }
  init_weights(model, plan.seed);
  for (RandomBlock& block : model->blocks) freeze(*block, block->plan.freeze);
  if (plan.embedding_frozen) freeze(*model->embedding, Freeze::kAll);
  return model;
}

void shard(RandomModel& model, const ModelPlan& plan, Layout layout) {
  FullyShardOptions options;
  options.layout = layout;
  if (plan.num_replicas) {
    options.mesh = init_device_mesh(c10::DeviceType::CPU,
                                    {*plan.num_replicas, plan.world_size / *plan.num_replicas},
                                    {"replicate", "shard"});
  }
  if (plan.precision == Precision::kBFloat16Policy) {
    options.mp_policy.param_dtype = at::kBFloat16;
    options.mp_policy.reduce_dtype = at::kFloat;
  }
  const auto shard_if_planned = [&](torch::nn::Module& module, const ShardPlan& shard_plan) {
    if (!shard_plan) return;
    options.reshard_after_forward = *shard_plan;
    fully_shard(module, options);
  };
  for (RandomBlock& block : model->blocks) {
    if (block->norm) shard_if_planned(*block->norm, block->plan.inner_shard);
    if (!block->linears.empty()) {
      shard_if_planned(*block->linears.front(), block->plan.inner_shard);
    }
    shard_if_planned(*block, block->plan.shard);
  }
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    shard_if_planned(*model->stages[i], plan.stages[i].shard);
  }
  if (plan.vocab_size) shard_if_planned(*model->embedding, plan.embedding_shard);
  shard_if_planned(*model->head, plan.head_shard);
  shard_if_planned(*model, plan.root_reshard);
  model->set_reshard_after_backward(plan.reshard_after_backward);
}

namespace {

struct Batch {
  at::Tensor input;
  at::Tensor target_BO;

  [[nodiscard]] Batch rows(int64_t first, int64_t count) const {
    return {input.narrow(0, first, count), target_BO.narrow(0, first, count)};
  }
};

// The rows of all ranks of one microbatch, the same on every call.
Batch batch_of(const ModelPlan& plan, const Turn& turn) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(
      plan.seed * 1000 + static_cast<uint64_t>(turn.step * 10 + turn.microbatch));
  const int64_t num_rows = plan.rows_per_rank * plan.world_size;
  const at::Tensor target = at::randn({num_rows, plan.head_width}, generator, plan.dtype());
  if (plan.vocab_size) {
    return {at::randint(0, *plan.vocab_size, {num_rows}, generator, at::kLong), target};
  }
  return {at::randn({num_rows, plan.input_width()}, generator, plan.dtype()), target};
}

at::Tensor loss_of(RandomModel& model, const ModelPlan& plan, const Batch& batch,
                   const Turn& turn) {
  const at::Tensor difference = model(batch.input, turn).to(plan.dtype()) - batch.target_BO;
  return difference.pow(2).mean() / plan.num_microbatches();
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const ModelPlan& plan,
                                                        std::vector<at::Tensor> params) {
  if (plan.optimizer == OptimizerKind::kAdamW) {
    return std::make_unique<torch::optim::AdamW>(
        std::move(params), torch::optim::AdamWOptions(0.02).eps(kAdamEpsilon));
  }
  return std::make_unique<torch::optim::SGD>(std::move(params),
                                             torch::optim::SGDOptions(0.02).momentum(0.9));
}

// `backward(step)` computes the gradients of one step and returns its loss.
TrainingLog train(RandomModel& model, const ModelPlan& plan,
                  const std::function<double(int)>& backward) {
  const auto optimizer = make_optimizer(plan, parameters(*model));
  TrainingLog log;
  for (const auto& entry : model->named_parameters()) log.names.push_back(entry.key());
  for (int step = 0; step < plan.num_steps; ++step) {
    log.losses.push_back(backward(step));
    auto& grads = log.whole_grads.emplace_back();
    for (const at::Tensor& param : model->parameters()) {
      const at::Tensor& grad = param.grad();
      grads.push_back(grad.defined() ? full_tensor(grad).clone() : at::Tensor());
    }
    optimizer->step();
    optimizer->zero_grad(plan.zero_grad_to_none);
  }
  for (const at::Tensor& param : model->parameters()) {
    log.whole_params.push_back(full_tensor(param).detach().clone());
  }
  return log;
}

void begin_microbatch(RandomModel& model, const ModelPlan& plan, int64_t microbatch) {
  const bool is_last = microbatch == plan.num_microbatches() - 1;
  switch (plan.accumulation) {
    case Accumulation::kNone:
      return;
    case Accumulation::kNoSync:
      model->set_requires_gradient_sync(is_last);
      break;
    case Accumulation::kNoAllReduce:
      model->set_requires_all_reduce(is_last);
      break;
    case Accumulation::kSyncEach:
      break;
  }
  model->set_is_last_backward(is_last);
}

// Adds to `sums` the gradients of `params`, as fp32, and drops them there.
void take_grads(const std::vector<at::Tensor>& params, std::vector<at::Tensor>& sums) {
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor grad = std::move(params[i].mutable_grad());
    if (!grad.defined()) continue;
    sums[i] = sums[i].defined() ? sums[i] + grad.to(at::kFloat) : grad.to(at::kFloat);
  }
}

// `low`, a bf16 copy of `model`, computes; the gradients of `model` are fp32.
double backward_in_bf16(RandomModel& model, RandomModel& low, const ModelPlan& plan, int step) {
  copy_parameters(*model, *low);
  const std::vector<at::Tensor> params = parameters(*model);
  std::vector<at::Tensor> sums(params.size());
  double loss_sum = 0;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    for (int64_t microbatch = 0; microbatch < plan.num_microbatches(); ++microbatch) {
      const Turn turn{step, microbatch};
      Batch batch = batch_of(plan, turn).rows(rank * plan.rows_per_rank, plan.rows_per_rank);
      if (batch.input.is_floating_point()) batch.input = batch.input.to(at::kBFloat16);
      const at::Tensor loss = loss_of(low, plan, batch, turn);
      loss.backward();
      loss_sum += loss.item<double>();
      take_grads(parameters(*low), sums);
    }
  }
  for (size_t i = 0; i < params.size(); ++i) {
    if (!sums[i].defined()) continue;
    at::Tensor& grad = params[i].mutable_grad();
    const at::Tensor mean = sums[i] / plan.world_size;
    grad = grad.defined() ? grad + mean : mean;
  }
  return loss_sum / plan.world_size;
}

}  // namespace

TrainingLog train_sharded(RandomModel& model, const ModelPlan& plan, const ProcessGroupPtr& group) {
  return train(model, plan, [&](int step) {
    double loss_sum = 0;
    for (int64_t microbatch = 0; microbatch < plan.num_microbatches(); ++microbatch) {
      const Turn turn{step, microbatch};
      begin_microbatch(model, plan, microbatch);
      const Batch batch =
          batch_of(plan, turn).rows(group->getRank() * plan.rows_per_rank, plan.rows_per_rank);
      const at::Tensor loss = loss_of(model, plan, batch, turn);
      loss.backward();
      loss_sum += loss.item<double>();
    }
    return mean_over_ranks(loss_sum, group);
  });
}

TrainingLog train_unsharded(const ModelPlan& plan) {
  RandomModel model = build(plan);
  if (plan.precision == Precision::kBFloat16Policy) {
    RandomModel low = build(plan);
    for (at::Tensor& param : low->parameters()) {
      if (param.is_floating_point()) param.set_data(param.to(at::kBFloat16));
    }
    return train(model, plan, [&](int step) { return backward_in_bf16(model, low, plan, step); });
  }
  return train(model, plan, [&](int step) {
    double loss_sum = 0;
    for (int64_t microbatch = 0; microbatch < plan.num_microbatches(); ++microbatch) {
      const Turn turn{step, microbatch};
      const at::Tensor loss = loss_of(model, plan, batch_of(plan, turn), turn);
      loss.backward();
      loss_sum += loss.item<double>();
    }
    return loss_sum;
  });
}

}  // namespace fsdp::testing
