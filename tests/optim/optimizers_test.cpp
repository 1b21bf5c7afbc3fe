#include <functional>
#include <memory>

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "support/layouts.h"
#include "support/models.h"

namespace fsdp {
namespace {

using OptimizerFactory =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

struct OptimizerCase {
  const char* name;
  OptimizerFactory make;
};

template <class Optimizer, class Options>
OptimizerCase optimizer_case(const char* name, Options options) {
  return {name, [options](std::vector<at::Tensor> params) {
            return std::make_unique<Optimizer>(std::move(params), options);
          }};
}

class OptimizersTest : public ::testing::TestWithParam<std::tuple<OptimizerCase, Layout>> {};

// Promise: torch's optimizers work on the sharded parameters as they are: with empty shards (3 rows
// over 8 ranks), a plain parameter in the same optimizer, clipping, and zero_grad in both ways.
// Equal to the unsharded training up to the order of sums: the reduction's, and in the norm that of
// sharded and plain parameters.
TEST_P(OptimizersTest, TrainOnShards) {
  const OptimizerCase& optimizer_case = std::get<0>(GetParam());
  const auto run = [&](bool shard) {
    testing::MLP model(3);
    testing::init_parameters(*model);
    const at::Tensor plain = model->out_proj->bias;
    if (shard) fully_shard(*model, {.ignored_params = {plain}, .layout = std::get<1>(GetParam())});
    const auto optimizer = optimizer_case.make(model->parameters());
    for (int step = 0; step < 6; ++step) {
      const at::Tensor x = at::ones({2, 3}) * (step + 1);
      model(x).sum().backward();
      clip_grad_norm_(model->parameters(), 0.5);
      optimizer->step();
      optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
    }
    std::vector<at::Tensor> whole;
    for (const at::Tensor& param : model->parameters())
      whole.push_back(full_tensor(param).detach());
    return whole;
  };
  const std::vector<at::Tensor> expected = run(/*shard=*/false);
  for (const int world_size : {1, 2, 8}) {
    run_ranks(world_size, [&](const ProcessGroupPtr&) {
      const std::vector<at::Tensor> ours = run(/*shard=*/true);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(ours[i].allclose(expected[i], 1e-5, 1e-6))
            << optimizer_case.name << ", world " << world_size << ", parameter " << i;
      }
    });
  }
}

class Parameters : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(Parameters);

// Promise: parameters() of this library lists a tied parameter once, where the module's own lists
// it under both names; clipping counts it once either way.
TEST_P(Parameters, EachOnce) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    testing::Transformer model(testing::TransformerOptions{.weight_tying = true});
    fully_shard(*model, {.layout = GetParam()});
    const std::vector<at::Tensor> once = parameters(*model);
    EXPECT_EQ(once.size() + 1, model->parameters().size());
    for (const at::Tensor& param : once) {
      at::Tensor(param).mutable_grad() = at::ones(param.sizes());
    }
    const float norm = clip_grad_norm_(once, 1e9).item<float>();
    EXPECT_EQ(clip_grad_norm_(model->parameters(), 1e9).item<float>(), norm);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Torch, OptimizersTest,
    ::testing::Combine(
        ::testing::Values(
            optimizer_case<torch::optim::SGD>("SGD", torch::optim::SGDOptions(0.1)),
            optimizer_case<torch::optim::SGD>(
                "SGDMomentum",
                torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01)),
            optimizer_case<torch::optim::Adam>("Adam", torch::optim::AdamOptions(1e-2)),
            optimizer_case<torch::optim::AdamW>("AdamW", torch::optim::AdamWOptions(1e-2)),
            optimizer_case<torch::optim::AdamW>("AmsGrad",
                                                torch::optim::AdamWOptions(1e-2).amsgrad(true))),
        testing::layouts()),
    [](const auto& info) {
      return std::get<0>(info.param).name + ("_" + testing::name_of(std::get<1>(info.param)));
    });

}  // namespace
}  // namespace fsdp
