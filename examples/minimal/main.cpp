// One training step of a small MLP, sharded over two ranks that are threads of this process.
// Exits with 0 if the step made the loss smaller.

#include <cstdio>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/fsdp.h"

// Dimensions in names: B batch, I inputs, H hidden, O outputs.
namespace {

class LayerImpl : public torch::nn::Module {
 public:
  LayerImpl(int64_t num_inputs, int64_t num_outputs)
      : linear_(register_module("linear", torch::nn::Linear(num_inputs, num_outputs))) {}
  at::Tensor forward(const at::Tensor& x_BI) { return linear_(x_BI); }

 private:
  torch::nn::Linear linear_;
};
FSDP_MODULE(Layer);

class MLPImpl : public torch::nn::Module {
 public:
  MLPImpl()
      : up(register_module("up", Layer(16, 64))), down(register_module("down", Layer(64, 4))) {}
  at::Tensor forward(const at::Tensor& x_BI) {
    const at::Tensor hidden_BH = torch::relu(up(x_BI));
    return down(hidden_BH);
  }

  Layer up, down;
};
FSDP_MODULE(MLP);

/// Ranks begin with equal weights: each draws them from a generator of its own, of the same seed.
/// (The process-wide generator is shared by ranks that are threads.)
void initialize(MLP& mlp) {
  const torch::NoGradGuard no_grad;
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(/*seed=*/1);
  for (at::Tensor& param : mlp->parameters()) param.normal_(0.0, 0.1, generator);
}

double mean_over_ranks(const at::Tensor& loss, const fsdp::ProcessGroupPtr& group) {
  std::vector<at::Tensor> sum = {loss.detach().clone()};
  group->allreduce(sum)->wait();
  return sum[0].item<double>() / group->getSize();
}

struct Losses {
  double before;
  double after;
};

Losses train_one_step(const fsdp::ProcessGroupPtr& group) {
  MLP mlp;
  initialize(mlp);

  fsdp::fully_shard(*mlp->up);  // bottom-up: each call makes one all-gather and one reduce-scatter
  fsdp::fully_shard(*mlp->down);
  fsdp::fully_shard(*mlp);
  torch::optim::AdamW optimizer(mlp->parameters(), torch::optim::AdamWOptions(1e-2));

  // Each rank has samples of its own.
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(/*seed=*/2 + group->getRank());
  const at::Tensor x_BI = at::randn({8, 16}, generator);
  const at::Tensor target_BO = at::randn({8, 4}, generator);

  const at::Tensor loss = torch::mse_loss(mlp(x_BI), target_BO);
  loss.backward();
  fsdp::clip_grad_norm_(mlp->parameters(), /*max_norm=*/1.0);
  optimizer.step();
  optimizer.zero_grad();

  const at::Tensor loss_after = torch::mse_loss(mlp(x_BI), target_BO);
  return {mean_over_ranks(loss, group), mean_over_ranks(loss_after, group)};
}

}  // namespace

int main() {
  bool smaller = false;
  fsdp::run_ranks(2, [&](const fsdp::ProcessGroupPtr& group) {
    const Losses losses = train_one_step(group);
    if (group->getRank() != 0) return;
    std::printf("loss over %d ranks: %.4f, after one step: %.4f\n", group->getSize(), losses.before,
                losses.after);
    smaller = losses.after < losses.before;
  });
  return smaller ? 0 : 1;
}
