#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "fsdp/adamw.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "support/layouts.h"
#include "support/messages.h"
#include "support/models.h"

// Ranks that take different branches, and so have gradients for different parameters.

namespace fsdp {
namespace {

using testing::expect_message;

// Three linears, of which forward uses those it is told to.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    for (int i = 0; i < 3; ++i) {
      linears.push_back(register_module("linear" + std::to_string(i), torch::nn::Linear(3, 3)));
    }
  }
  at::Tensor forward(at::Tensor x, const std::vector<int>& used) {
    for (const int i : used) x = linears[static_cast<size_t>(i)](x);
    return x;
  }
  std::vector<torch::nn::Linear> linears;
};
FSDP_MODULE(Branches);

// Which linears each rank uses. Nobody uses the last.
std::vector<int> branch_of(int rank) {
  return rank % 2 == 0 ? std::vector<int>{0} : std::vector<int>{1};
}

at::Tensor input_of(int rank) { return at::full({2, 3}, 0.5 + rank).set_requires_grad(true); }

class BranchesTest : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(BranchesTest);

// Promise: a parameter's gradient is the mean over all ranks, those without one counted as zeros;
// one that nobody has stays undefined on every rank; and all ranks step the same. Against one
// process that runs every rank's branch.
TEST_P(BranchesTest, MissingGradientsCountAsZeros) {
  for (const int world_size : {1, 2, 3, 5}) {
    Branches reference;
    testing::init_parameters(*reference);
    AdamW reference_optimizer(reference->parameters(), AdamWOptions(0.1));
    std::vector<at::Tensor> reference_grads;
    for (int step = 0; step < 3; ++step) {
      reference_optimizer.zero_grad();
      for (int rank = 0; rank < world_size; ++rank) {
        (reference(input_of(rank), branch_of(rank)).sum() / world_size).backward();
      }
      reference_optimizer.step();
    }
    run_ranks(world_size, [&](const ProcessGroupPtr& group) {
      Branches model;
      testing::init_parameters(*model);
      fully_shard(*model, {.layout = GetParam()});
      AdamW optimizer(parameters(*model), AdamWOptions(0.1));
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        model(input_of(group->getRank()), branch_of(group->getRank())).sum().backward();
        optimizer.step();
      }
      const auto expected = reference->parameters();
      const auto ours = parameters(*model);
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(ours[i].grad().defined(), expected[i].grad().defined()) << i;
        EXPECT_TRUE(full_tensor(ours[i]).allclose(expected[i], 1e-5, 1e-6)) << i;
        if (!expected[i].grad().defined()) continue;
        EXPECT_TRUE(full_tensor(ours[i].grad()).allclose(expected[i].grad(), 1e-5, 1e-6)) << i;
      }
    });
  }
}

// Promise: the same with replicas, reduced in bf16, and with gradients kept for a later sync.
TEST_P(BranchesTest, WithReplicasInBf16AndWithoutSync) {
  run_ranks(4, [](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    for (const bool replicas : {false, true}) {
      Branches model;
      Branches reference;
      testing::init_parameters(*model);
      testing::init_parameters(*reference);
      FullyShardOptions options{.layout = GetParam()};
      options.mp_policy.reduce_dtype = at::kBFloat16;
      if (replicas) options.mesh = init_device_mesh(c10::kCPU, {2, 2}, {"replicate", "shard"});
      fully_shard(*model, options);
      for (int r = 0; r < 4; ++r)
        (reference->forward(input_of(r), {r == 3 ? 1 : 0}).sum() / 4).backward();
      model->set_requires_gradient_sync(false);
      model->forward(input_of(rank), {rank == 3 ? 1 : 0}).sum().backward();
      model->set_requires_gradient_sync(true);
      model->forward(at::zeros({2, 3}), {0}).mul(0).sum().backward();
      const auto ours = parameters(*model);
      const auto expected = reference->parameters();
      for (size_t i = 0; i < ours.size(); ++i) {
        ASSERT_EQ(ours[i].grad().defined(), expected[i].grad().defined()) << i;
        if (!expected[i].grad().defined()) continue;
        EXPECT_TRUE(full_tensor(ours[i].grad()).allclose(expected[i].grad(), 2e-2, 2e-2)) << i;
      }
    }
  });
}

// Promise: with require_equal_gradients it is an error on every rank, and none steps.
TEST_P(BranchesTest, CanBeRefused) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    Branches model;
    testing::init_parameters(*model);
    fully_shard(*model, {.layout = GetParam(), .require_equal_gradients = true});
    const at::Tensor x = input_of(group->getRank());
    model->forward(x, {0, 1}).sum().backward();  // equal on all, though the third has none
    model->zero_grad();
    expect_message<StateError>(
        [&] {
          model->forward(x, group->getRank() == 1 ? std::vector<int>{1} : std::vector<int>{0, 1})
              .sum()
              .backward();
        },
        "'linear0.weight' of shape [3, 3] has a gradient on some ranks only");
    for (const at::Tensor& param : parameters(*model)) EXPECT_FALSE(param.grad().defined());
    model->forward(x, {0, 1}).sum().backward();  // and the next step works
    EXPECT_TRUE(parameters(*model)[0].grad().defined());
  });
}

// Promise: reductions that are not all-reduced yet count together: a parameter that every rank used
// in one of them is equal, and one that only this rank's replica used is not lost.
TEST_P(BranchesTest, OverSeveralReductionsWithoutAllReduce) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{1, 1}, {2, 1}, {1, 2}, {2, 2}}) {
    run_ranks(static_cast<int>(shape[0] * shape[1]), [&](const ProcessGroupPtr& group) {
      Branches model;
      Branches reference;
      testing::init_parameters(*model);
      testing::init_parameters(*reference);
      fully_shard(*model, {.mesh = init_device_mesh(c10::kCPU, shape, {"replicate", "shard"}),
                           .layout = GetParam(),
                           .require_equal_gradients = true});
      for (int r = 0; r < group->getSize(); ++r) {
        for (const int used : {0, 1}) {
          (reference->forward(input_of(r), {used}).sum() / group->getSize()).backward();
        }
      }
      model->set_requires_all_reduce(false);
      model->forward(input_of(group->getRank()), {0}).sum().backward();
      model->set_requires_all_reduce(true);
      model->forward(input_of(group->getRank()), {1}).sum().backward();
      const auto ours = parameters(*model);
      const auto expected = reference->parameters();
      for (size_t i = 0; i < ours.size(); ++i) {
        ASSERT_EQ(ours[i].grad().defined(), expected[i].grad().defined()) << i;
        if (!expected[i].grad().defined()) continue;
        EXPECT_TRUE(full_tensor(ours[i].grad()).allclose(expected[i].grad(), 1e-5, 1e-6)) << i;
      }
    });
  }
}

// A chain of two blocks, each a group; a rank may leave the first one's result out of its loss.
struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    first = register_module("first", fsdp::nn::Linear(3, 3));
    second = register_module("second", fsdp::nn::Linear(3, 3));
  }
  at::Tensor forward(const at::Tensor& x, bool uses_first) {
    const at::Tensor y = first(x);
    return second(uses_first ? y : x);
  }
  fsdp::nn::Linear first{nullptr};
  fsdp::nn::Linear second{nullptr};
};
FSDP_MODULE(Chain);

// Promise: a group that ran forward everywhere, but is used in backward on some ranks only, reduces
// zeros there with set_reduce_scatter_unused_params(true).
TEST_P(BranchesTest, WholeGroupWithoutGradients) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    Chain model;
    Chain reference;
    testing::init_parameters(*model);
    testing::init_parameters(*reference);
    fully_shard(*model->first, {.layout = GetParam()});
    fully_shard(*model->second, {.layout = GetParam()});
    fully_shard(*model, {.layout = GetParam()});
    model->set_reduce_scatter_unused_params(true);
    for (int r = 0; r < 3; ++r) (reference(input_of(r), r == 1).sum() / 3).backward();
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      model(input_of(group->getRank()), group->getRank() == 1).sum().backward();
      const auto ours = parameters(*model);
      const auto expected = reference->parameters();
      for (size_t i = 0; i < ours.size(); ++i) {
        EXPECT_TRUE(full_tensor(ours[i].grad()).allclose(expected[i].grad(), 1e-5, 1e-6)) << i;
      }
    }
    // Nobody uses the first: zeros, as in FSDP2.
    model->zero_grad();
    model(input_of(group->getRank()), false).sum().backward();
    EXPECT_EQ(full_tensor(model->first->parameters()[0].grad()).abs().sum().item<float>(), 0);
  });
}

// Promise: reductions in another order are seen, though the collectives look alike: where the input
// of `second` requires no grad its reduction comes last.
TEST_P(BranchesTest, AnotherOrderIsAnError) {
  EXPECT_ANY_THROW(run_ranks(3, [](const ProcessGroupPtr& group) {
    Chain model;
    testing::init_parameters(*model);
    fully_shard(*model->first, {.layout = GetParam()});
    fully_shard(*model->second, {.layout = GetParam()});
    fully_shard(*model, {.layout = GetParam()});
    model->set_reduce_scatter_unused_params(true);
    const at::Tensor x = input_of(group->getRank()).detach();
    expect_message<StateError>([&] { model(x, group->getRank() == 1).sum().backward(); },
                               "were added to those of another group on some rank");
    throw std::runtime_error("told");
  }));
}

// Promise: without it, and where a rank does not even run a module that others run, every rank gets
// an error: no hang, no gradients of something else.
TEST_P(BranchesTest, DifferentModulesAreAnError) {
  for (const bool in_forward : {false, true}) {
    EXPECT_ANY_THROW(run_ranks(3,
                               [&](const ProcessGroupPtr& group) {
                                 Chain model;
                                 testing::init_parameters(*model);
                                 fully_shard(*model->first, {.layout = GetParam()});
                                 fully_shard(*model->second, {.layout = GetParam()});
                                 fully_shard(*model, {.layout = GetParam()});
                                 const at::Tensor x = input_of(group->getRank());
                                 const bool leaves_out = group->getRank() == 1;
                                 EXPECT_ANY_THROW({
                                   if (in_forward && leaves_out) {
                                     model->second(x).sum().backward();
                                   } else {
                                     model(x, !leaves_out).sum().backward();
                                   }
                                   group->barrier()->wait();
                                 });
                                 throw std::runtime_error("told");
                               },
                               {.timeout = std::chrono::seconds(3)}));
  }
}

}  // namespace
}  // namespace fsdp
