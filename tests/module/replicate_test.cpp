#include "fsdp/replicate.h"

#include <sstream>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/comm_debug.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "support/counting_allocator.h"
#include "support/layouts.h"
#include "support/messages.h"
#include "support/training.h"

// replicate() against the same training in one process.

namespace fsdp {
namespace {

using testing::DoubleLinear;
using testing::expect_message;
using testing::MLP;
using testing::OptimizerKind;
using testing::TrainingLog;
using testing::TrainingOptions;
using testing::Transformer;

constexpr const char* kAllReduce = "allreduce_";
constexpr double kMiB = 1 << 20;
constexpr int64_t kDim = 6;

// What rank `rank` sees in a step; [2, kDim].
at::Tensor input_of(int rank, int step = 0) {
  return at::arange(2 * kDim, at::kFloat).view({2, kDim}).add(3 * rank + 7 * step).sin();
}

template <class Model>
Model make(uint64_t seed = 42) {
  Model model(kDim);
  testing::init_parameters(*model, seed);
  return model;
}

using LossOfRank = std::function<at::Tensor(int rank)>;

// What the gradients are to be: those of the mean loss of all ranks, computed in one process.
std::vector<at::Tensor> mean_grads(torch::nn::Module& model, int world_size,
                                   const LossOfRank& loss_of) {
  at::Tensor total = at::zeros({});
  for (int rank = 0; rank < world_size; ++rank) total = total + loss_of(rank);
  (total / world_size).backward();
  std::vector<at::Tensor> grads;
  for (const at::Tensor& param : parameters(model)) grads.push_back(param.grad());
  return grads;
}

void expect_grads(torch::nn::Module& model, const std::vector<at::Tensor>& expected) {
  const std::vector<at::Tensor> params = parameters(model);
  ASSERT_EQ(params.size(), expected.size());
  for (size_t i = 0; i < params.size(); ++i) {
    ASSERT_EQ(params[i].grad().defined(), expected[i].defined()) << "parameter " << i;
    if (!expected[i].defined()) continue;
    // The sums are taken in another order than those of the reference.
    EXPECT_TRUE(params[i].grad().allclose(expected[i], 1e-5, 1e-6)) << "parameter " << i;
  }
}

using ParityCase = std::tuple<int, OptimizerKind, bool>;  // world, optimizer, many buckets

class ReplicateParity : public ::testing::TestWithParam<ParityCase> {};

// Promise: losses, every element of every gradient and the parameters are those of one process,
// beyond the rounding of the reduction order; with one rank to the bit. (Two weights are tied.)
TEST_P(ReplicateParity, EqualsOneProcess) {
  const auto& [world_size, optimizer, many_buckets] = GetParam();
  const TrainingOptions options{.model = {.vocab_size = 13, .dim = 15, .num_heads = 3},
                                .optimizer = optimizer};
  const TrainingLog reference = testing::train(options, nullptr, [](Transformer&) {});
  run_ranks(world_size, [&, many_buckets = many_buckets](const ProcessGroupPtr& group) {
    const TrainingLog log = testing::train(options, group, [&](Transformer& model) {
      replicate(*model, {.bucket_cap_mb = many_buckets ? 512 / kMiB : 25});
    });
    const double tolerance = group->getSize() == 1 ? 0 : 1e-5;
    for (size_t step = 0; step < reference.losses.size(); ++step) {
      EXPECT_NEAR(log.losses[step], reference.losses[step], tolerance * reference.losses[step]);
    }
    for (size_t i = 0; i < reference.names.size(); ++i) {
      for (size_t step : {0, 1}) {
        EXPECT_TRUE(
            log.whole_grads[step][i].allclose(reference.whole_grads[step][i], tolerance, tolerance))
            << reference.names[i];
      }
      // AdamW divides by the square root of tiny gradients: differences of rounding grow.
      EXPECT_TRUE(
          log.whole_params[i].allclose(reference.whole_params[i], 10 * tolerance, 10 * tolerance))
          << reference.names[i];
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ReplicateParity,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(OptimizerKind::kSgdMomentum,
                                                              OptimizerKind::kAdamW),
                                            ::testing::Bool()));

// Promise: all ranks start with rank 0's parameters and buffers, unless told that they do.
TEST(Replicate, BroadcastsFromRankZero) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    for (const bool init_sync : {true, false}) {
      fsdp::nn::BatchNorm1d model(kDim);
      {
        const c10::NoGradGuard no_grad;
        model->weight.fill_(group->getRank() + 1.0);
        model->bias.set_requires_grad(false).fill_(group->getRank());
        model->running_mean.fill_(group->getRank());
      }
      replicate(*model, {.init_sync = init_sync});
      const double rank = init_sync ? 0 : group->getRank();
      EXPECT_TRUE(model->weight.equal(at::full({kDim}, rank + 1)));
      EXPECT_TRUE(model->bias.equal(at::full({kDim}, rank)));  // frozen ones too
      EXPECT_TRUE(model->running_mean.equal(at::full({kDim}, rank)));
    }
  });
}

// Promise: a forward begins with rank 0's buffers, after a step that changed them on each rank.
TEST(Replicate, KeepsBuffersEqual) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    for (const bool broadcast_buffers : {true, false}) {
      fsdp::nn::BatchNorm1d model(kDim), one(kDim);
      replicate(*model, {.broadcast_buffers = broadcast_buffers});
      model(input_of(group->getRank())).sum().backward();
      one(input_of(broadcast_buffers ? 0 : group->getRank()));
      model->eval();
      CommDebugMode comm;
      const c10::NoGradGuard no_grad;
      model(input_of(0));
      EXPECT_TRUE(model->running_mean.equal(one->running_mean));
      EXPECT_EQ(comm.total() > 0, broadcast_buffers);
      comm.reset();
      model(input_of(0));  // nothing has changed
      EXPECT_EQ(comm.total(), 0);
    }
  });
}

// Promise: gradients lie in their bucket, after zero_grad() of either kind too; or apart, if asked.
TEST(Replicate, GradientsAreViewsOfBuckets) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    for (const bool as_view : {true, false}) {
      auto model = make<MLP>();
      replicate(*model, {.gradient_as_bucket_view = as_view});
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
      for (int step = 0; step < 4; ++step) {
        auto reference = make<MLP>();
        testing::copy_parameters(*model, *reference);
        const auto expected = mean_grads(
            *reference, 2, [&](int rank) { return reference(input_of(rank, step)).sum(); });
        model(input_of(group->getRank(), step)).sum().backward();
        const auto params = model->parameters();
        for (const at::Tensor& param : params) {
          EXPECT_EQ(param.grad().is_alias_of(params[0].grad()),
                    as_view || param.is_same(params[0]));
        }
        expect_grads(*model, expected);
        optimizer.step();
        optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
      }
    }
  });
}

// Promise: buckets are as large as they may be, the first one apart, and each is one all-reduce.
TEST(Replicate, ReducesInBuckets) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto num_all_reduces = [&](double first_bytes, double bytes) {
      fsdp::nn::Sequential model;
      const auto no_bias = torch::nn::LinearOptions(kDim, kDim).bias(false);
      for (int i = 0; i < 6; ++i) model->push_back(fsdp::nn::Linear(no_bias));
      replicate(*model, {.bucket_cap_mb = bytes / kMiB, .first_bucket_cap_mb = first_bytes / kMiB});
      for (int step = 0;; ++step) {  // the buckets are made anew after the first backward
        const at::Tensor loss = model->forward(input_of(group->getRank())).sum();
        const CommDebugMode comm;
        loss.backward();
        EXPECT_EQ(comm.bytes(kAllReduce), 6 * kDim * kDim * 4);
        EXPECT_EQ(comm.total(), comm.count(kAllReduce));
        if (step == 2) return comm.count(kAllReduce);
      }
    };
    const double param = kDim * kDim * 4;
    EXPECT_EQ(num_all_reduces(kMiB, 25 * kMiB), 1);
    EXPECT_EQ(num_all_reduces(1, 1), 6);
    EXPECT_EQ(num_all_reduces(param, 1), 6);  // the first is no larger than the others
    EXPECT_EQ(num_all_reduces(2 * param, 2 * param), 3);
    EXPECT_EQ(num_all_reduces(param, 2 * param), 4);  // 1, 2, 2, 1
    EXPECT_EQ(num_all_reduces(param, 5 * param), 2);  // 1, 5
  });
}

// Promise: the last layers' gradients are on their way while the first layer's are computed.
TEST(Replicate, ReducesWhileBackwardGoesOn) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    auto model = make<MLP>();
    replicate(*model, {.bucket_cap_mb = 1 / kMiB});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = model(input_of(group->getRank())).sum();
      const CommDebugMode comm;
      int64_t before = -1;
      const auto hook = model->in_proj->weight.register_hook(
          [&](const at::Tensor&) { before = comm.count(kAllReduce); });
      loss.backward();
      model->in_proj->weight.remove_hook(hook);
      EXPECT_GE(before, 2) << "the two of out_proj";
      EXPECT_EQ(comm.count(kAllReduce), 4);
    }
  });
}

// Promise: frozen and ignored parameters are not reduced.
TEST(Replicate, LeavesOutFrozenAndIgnoredParameters) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    auto model = make<MLP>(), reference = make<MLP>(), local = make<MLP>();
    for (auto& each : {model, reference, local}) each->in_proj->weight.set_requires_grad(false);
    const auto loss_of = [](MLP& of, int rank) { return of(input_of(rank)).sum(); };
    const auto expected =
        mean_grads(*reference, 2, [&](int rank) { return loss_of(reference, rank); });
    replicate(*model, {.ignored_params = {model->out_proj->bias}});
    const CommDebugMode comm;
    loss_of(model, group->getRank()).backward();
    loss_of(local, group->getRank()).backward();
    EXPECT_EQ(comm.bytes(kAllReduce), 4 * (4 * kDim + 4 * kDim * kDim));
    EXPECT_FALSE(model->in_proj->weight.grad().defined());
    EXPECT_TRUE(model->in_proj->bias.grad().allclose(expected[1]));
    EXPECT_TRUE(model->out_proj->weight.grad().allclose(expected[2]));
    EXPECT_TRUE(model->out_proj->bias.grad().allclose(local->out_proj->bias.grad()));
  });
}

// Promise: a module that runs several times before backward, inside of a forward or by several
// forwards, gets one gradient, reduced once.
TEST(Replicate, OfAModuleThatIsUsedTwice) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    auto model = make<MLP>(), reference = make<MLP>();
    const auto loss_of = [](MLP& of, int rank) {
      const at::Tensor once = of(input_of(rank));
      return (of(once) + of(input_of(rank, 1))).sum();
    };
    replicate(*model);
    for (int step = 0; step < 3; ++step) {
      const auto expected =
          mean_grads(*reference, 2, [&](int rank) { return loss_of(reference, rank); });
      const CommDebugMode comm;
      loss_of(model, group->getRank()).backward();
      EXPECT_EQ(comm.count(kAllReduce), 1);
      expect_grads(*model, expected);
      model->zero_grad();
      reference->zero_grad();
    }
  });
}

// Promise: within NoSync nothing is reduced; the first backward after it averages the sums.
TEST(Replicate, AccumulatesWithoutSync) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    for (const bool as_view : {true, false}) {
      auto model = make<MLP>(), reference = make<MLP>();
      replicate(*model, {.gradient_as_bucket_view = as_view});
      for (int step = 0; step < 3; ++step) {
        const auto loss_of = [&](MLP& of, int rank, int part) {
          return of(input_of(rank, 3 * step + part)).square().sum();
        };
        const auto expected = mean_grads(*reference, 3, [&](int rank) {
          return loss_of(reference, rank, 0) + loss_of(reference, rank, 1) +
                 loss_of(reference, rank, 2);
        });
        const CommDebugMode comm;
        {
          const NoSync no_sync(*model);
          loss_of(model, group->getRank(), 0).backward();
          { const NoSync inner(*model); }
          loss_of(model, group->getRank(), 1).backward();
        }
        EXPECT_EQ(comm.count(kAllReduce), 0);
        loss_of(model, group->getRank(), 2).backward();
        EXPECT_EQ(comm.count(kAllReduce), 1);
        expect_grads(*model, expected);
        model->zero_grad();
        reference->zero_grad();
      }
    }
  });
}

// Promise: a parameter without a gradient is told by its name, and how to allow it.
TEST(ReplicateUnused, IsAnErrorUnlessAsked) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    auto model = make<DoubleLinear>();
    replicate(*model);
    model(input_of(0)).first.sum().backward();
    expect_message<StateError>([&] { model(input_of(0)); }, "('lin2.weight', 'lin2.bias')");
    expect_message<StateError>([&] { model(input_of(0)); }, "set find_unused_parameters");
  });
}

struct BranchesImpl : torch::nn::Module {
  explicit BranchesImpl(int64_t dim) {
    for (auto* each : {&left, &right, &never}) *each = fsdp::nn::Linear(dim, dim);
    register_module("left", left);
    register_module("right", right);
    register_module("never", never);
  }
  at::Tensor forward(const at::Tensor& x, bool goes_left) { return goes_left ? left(x) : right(x); }
  fsdp::nn::Linear left{nullptr}, right{nullptr}, never{nullptr};
};
FSDP_MODULE(Branches);

// Promise: with find_unused_parameters ranks may take different branches: a missing gradient counts
// as zero; one that no rank has stays undefined.
TEST(ReplicateUnused, RanksMayTakeDifferentBranches) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    auto model = make<Branches>(), reference = make<Branches>();
    replicate(*model, {.bucket_cap_mb = 1 / kMiB, .find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {  // which ranks go left is another in each step
      const auto loss_of = [&](Branches& of, int rank) {
        return of(input_of(rank, step), rank == step).square().sum();
      };
      const auto expected =
          mean_grads(*reference, 3, [&](int rank) { return loss_of(reference, rank); });
      loss_of(model, group->getRank()).backward();
      expect_grads(*model, expected);
      model->zero_grad();
      reference->zero_grad();
    }
  });
}

// Promise: so may the parts of a batch: what was used without sync only is reduced as well.
TEST(ReplicateUnused, PartsWithoutSyncMayTakeOtherBranches) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    auto model = make<Branches>(), reference = make<Branches>();
    replicate(*model, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      const auto loss_of = [&](Branches& of, int rank, bool goes_left) {
        return of(input_of(rank, step), goes_left).square().sum();
      };
      const auto expected = mean_grads(*reference, 2, [&](int rank) {
        return loss_of(reference, rank, true) + loss_of(reference, rank, false);
      });
      {
        const NoSync no_sync(*model);
        loss_of(model, group->getRank(), true).backward();
      }
      loss_of(model, group->getRank(), false).backward();
      expect_grads(*model, expected);
      model->zero_grad();
      reference->zero_grad();
    }
  });
}

// Promise: so may outputs stay out of the loss; and outputs may be edited in place.
TEST(ReplicateUnused, OutputsMayStayOutOfTheLoss) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    auto model = make<DoubleLinear>(), reference = make<DoubleLinear>();
    replicate(*model, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      const auto output_of = [](DoubleLinear& of, int rank) {
        const auto [first, second] = of(input_of(rank));
        return rank == 0 ? first : second;
      };
      const auto expected = mean_grads(
          *reference, 2, [&](int rank) { return output_of(reference, rank).mul(2).sum(); });
      output_of(model, group->getRank()).mul_(2).sum().backward();
      expect_grads(*model, expected);
      model->zero_grad();
      reference->zero_grad();
    }
  });
}

// Promise: a static graph may have unused parameters; the first step finds them.
TEST(ReplicateUnused, StaticGraphLearnsThemInTheFirstStep) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    auto model = make<Branches>(), reference = make<Branches>();
    replicate(*model, {.bucket_cap_mb = 1 / kMiB, .static_graph = true});
    for (int step = 0; step < 4; ++step) {
      const auto loss_of = [&](Branches& of, int rank) {
        return of(input_of(rank, step), true).square().sum();
      };
      const auto expected =
          mean_grads(*reference, 2, [&](int rank) { return loss_of(reference, rank); });
      loss_of(model, group->getRank()).backward();
      for (const size_t used : {0, 1}) {
        EXPECT_TRUE(model->parameters()[used].grad().allclose(expected[used], 1e-5, 1e-6)) << step;
      }
      model->zero_grad();
      reference->zero_grad();
    }
  });
}

}  // namespace
}  // namespace fsdp
