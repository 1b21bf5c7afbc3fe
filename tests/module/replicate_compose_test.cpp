#include <sstream>
#include <stdexcept>

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/comm_debug.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/replicate.h"
#include "fsdp/sharded_tensor.h"
#include "support/counting_allocator.h"
#include "support/layouts.h"
#include "support/messages.h"
#include "support/training.h"

// replicate() beside fully_shard(), with errors, and when the module goes away.

namespace fsdp {
namespace {

using testing::expect_message;
using testing::MLP;
using testing::TrainingLog;
using testing::TrainingOptions;
using testing::Transformer;

constexpr const char* kAllReduce = "allreduce_";
constexpr int64_t kDim = 6;

at::Tensor input_of(int rank) {
  return at::arange(2 * kDim, at::kFloat).view({2, kDim}).add(3 * rank).sin();
}

MLP make_mlp(uint64_t seed = 42) {
  MLP model(kDim);
  testing::init_parameters(*model, seed);
  return model;
}

// The gradients of the mean over ranks of `loss_of(model, rank)`, in one process.
template <class LossOf>
std::vector<at::Tensor> mean_grads(MLP model, int world_size, const LossOf& loss_of) {
  at::Tensor total = at::zeros({});
  for (int rank = 0; rank < world_size; ++rank) total = total + loss_of(model, rank);
  (total / world_size).backward();
  std::vector<at::Tensor> grads;
  for (const at::Tensor& param : model->parameters()) grads.push_back(param.grad());
  return grads;
}

void expect_grads(const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(params.size(), expected.size());
  for (size_t i = 0; i < params.size(); ++i) {
    ASSERT_TRUE(params[i].grad().defined()) << "parameter " << i;
    // The sums are taken in another order than those of the reference.
    EXPECT_TRUE(full_tensor(params[i].grad()).allclose(expected[i], 1e-5, 1e-6)) << i;
  }
}

at::Tensor sum_of(MLP& model, int rank) { return model(input_of(rank)).sum(); }

class ReplicateAndShard : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(ReplicateAndShard);

void expect_parity(const TrainingLog& log, const TrainingLog& reference) {
  for (size_t step = 0; step < reference.losses.size(); ++step) {
    EXPECT_NEAR(log.losses[step], reference.losses[step], 1e-5 * reference.losses[step]);
  }
  for (size_t i = 0; i < reference.names.size(); ++i) {
    EXPECT_TRUE(log.whole_params[i].allclose(reference.whole_params[i], 1e-4, 1e-5))
        << reference.names[i];
  }
}

// Promise: of one model some modules may be sharded and the rest replicated, in either order; it
// trains as in one process.
TEST_P(ReplicateAndShard, TrainAsOneProcess) {
  const TrainingOptions options;
  const TrainingLog reference = testing::train(options, nullptr, [](Transformer&) {});
  run_ranks(3, [&](const ProcessGroupPtr& group) {
    const auto shard = [&](torch::nn::Module& module) {
      fully_shard(module, {.layout = GetParam()});
    };
    expect_parity(testing::train(options, group,
                                 [&](Transformer& model) {
                                   shard(*model->blocks[0]);
                                   replicate(*model);
                                   EXPECT_FALSE(model->is_fully_sharded());
                                   EXPECT_NE(spec_of(model->blocks[0]->parameters()[0]), nullptr);
                                   EXPECT_EQ(spec_of(model->blocks[1]->parameters()[0]), nullptr);
                                 }),
                  reference);
    expect_parity(testing::train(options, group,
                                 [&](Transformer& model) {
                                   replicate(*model->blocks[0]);
                                   shard(*model);
                                   EXPECT_EQ(spec_of(model->blocks[0]->parameters()[0]), nullptr);
                                   EXPECT_NE(spec_of(model->blocks[1]->parameters()[0]), nullptr);
                                 }),
                  reference);
  });
}

// Promise: what is replicated or sharded already is not reduced a second time.
TEST_P(ReplicateAndShard, EachParameterOnce) {
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    MLP model = make_mlp();
    const auto expected = mean_grads(make_mlp(), 2, sum_of);
    replicate(*model->in_proj);
    fully_shard(*model->out_proj, {.layout = GetParam()});
    expect_message<ConfigError>([&] { replicate(*model); }, "there is nothing to reduce");
    const CommDebugMode comm;
    sum_of(model, group->getRank()).backward();
    EXPECT_EQ(comm.count(kAllReduce), 1);
    EXPECT_EQ(comm.count("_reduce_scatter_base_"), 1);
    expect_grads(model->parameters(), expected);
  });
}

// Promise: a mistake is told before anything is changed.
TEST_P(ReplicateAndShard, ErrorsOfArguments) {
  run_ranks(2, [&](const ProcessGroupPtr&) {
    torch::nn::Linear plain(2, 2);
    expect_message<ConfigError>([&] { replicate(*plain); }, "runs no hooks around forward");

    MLP sharded = make_mlp();
    fully_shard(*sharded, {.layout = GetParam()});
    expect_message<ConfigError>([&] { replicate(*sharded); }, "is sharded already");
    expect_message<ConfigError>([&] { replicate(*sharded->in_proj); }, "nothing to reduce");
    expect_message<StateError>([&] { const NoSync no_sync(*sharded); }, "Call replicate() first");

    MLP model = make_mlp();
    expect_message<ConfigError>([&] { replicate(*model, {.bucket_cap_mb = 0}); },
                                "must be positive, found 0 and 1");
    expect_message<ConfigError>([&] { replicate(*model, {.ignored_params = {at::Tensor()}}); },
                                "ignored parameter 0 is undefined");
    EXPECT_FALSE(is_replicated(*model));
    replicate(*model);
    EXPECT_TRUE(is_replicated(*model));
    expect_message<ConfigError>([&] { replicate(*model); }, "is replicated already");
    expect_message<ConfigError>([&] { fully_shard(*model, {.layout = GetParam()}); },
                                "is replicated, so its parameters are to stay whole");

    MLP frozen = make_mlp();
    for (const at::Tensor& param : frozen->parameters()) param.set_requires_grad(false);
    expect_message<ConfigError>([&] { replicate(*frozen); }, "none of them requires a gradient");
  });
}

// Promise: a rank with another model or other options is told what differs.
TEST(ReplicateErrors, RanksDiffer) {
  const auto expect_difference = [](const std::string& what,
                                    const std::function<void(MLP&)>& replicate_other) {
    expect_message<StateError>(
        [&] {
          run_ranks(2, [&](const ProcessGroupPtr& group) {
            MLP model = make_mlp();
            if (group->getRank() == 1) return replicate_other(model);
            replicate(*model);
            sum_of(model, 0).backward();
          });
        },
        what);
  };
  expect_difference("'in_proj.weight' [30, 6] Float replicated", [](MLP&) {
    MLP wider(kDim, 5);
    replicate(*wider);
  });
  expect_difference("'in_proj.bias' [24] Float frozen replicated", [](MLP& model) {
    model->in_proj->bias.set_requires_grad(false);
    replicate(*model);
  });
  expect_difference("find_unused_parameters true",
                    [](MLP& model) { replicate(*model, {.find_unused_parameters = true}); });
}

// Promise: a replicated module holds whole parameters: it may be saved and cloned; the clone is not
// replicated.
TEST(ReplicateLife, MayBeSavedAndCloned) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    MLP model = make_mlp(), other = make_mlp(7);
    fsdp::nn::Linear linear(2, 2);
    replicate(*model);
    replicate(*linear);
    std::stringstream stream;
    torch::save(model, stream);
    torch::load(other, stream);
    EXPECT_TRUE(other->in_proj->weight.equal(model->in_proj->weight));
    const auto clone = linear->clone();
    EXPECT_FALSE(is_replicated(*clone));
    EXPECT_TRUE(clone->parameters()[0].equal(linear->weight));
  });
}

// Promise: after to() the next step reduces in the new dtype.
TEST(ReplicateLife, MayBeConverted) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto loss_of = [](MLP& of, int rank) { return of(input_of(rank).to(at::kDouble)).sum(); };
    MLP model = make_mlp(), reference = make_mlp();
    replicate(*model);
    sum_of(model, group->getRank()).backward();
    model->zero_grad();
    model->to(at::kDouble);
    reference->to(at::kDouble);
    const CommDebugMode comm;
    loss_of(model, group->getRank()).backward();
    EXPECT_EQ(comm.bytes(kAllReduce), 8 * (8 * kDim * kDim + 5 * kDim));
    expect_grads(model->parameters(), mean_grads(reference, 2, loss_of));
  });
}

struct ThrowingImpl : torch::nn::Module {
  explicit ThrowingImpl(int64_t dim) { register_module("mlp", mlp = MLP(dim)); }
  at::Tensor forward(const at::Tensor& x) {
    if (throws_in_forward) throw std::runtime_error("in forward");
    at::Tensor hidden = mlp->in_proj(x);
    if (throws_in_backward) {
      hidden.register_hook([](const at::Tensor&) { throw std::runtime_error("in backward"); });
    }
    return mlp->out_proj(hidden);
  }
  bool throws_in_forward = false, throws_in_backward = false;
  MLP mlp{nullptr};
};
FSDP_MODULE(Throwing);

// Promise: after a forward or a backward that threw on all ranks, the next step is as ever.
TEST(ReplicateLife, GoesOnAfterAnException) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    Throwing model(kDim), reference(kDim);
    testing::init_parameters(*model);
    testing::init_parameters(*reference);
    const auto loss_of = [](Throwing& of, int rank) { return of(input_of(rank)).square().sum(); };
    ((loss_of(reference, 0) + loss_of(reference, 1)) / 2).backward();
    std::vector<at::Tensor> expected;
    for (const at::Tensor& param : reference->parameters()) expected.push_back(param.grad());

    replicate(*model, {.bucket_cap_mb = 1e-6});
    for (int step = 0; step < 4; ++step) {
      model->throws_in_forward = step == 1;
      model->throws_in_backward = step == 0 || step == 2;
      try {
        loss_of(model, group->getRank()).backward();
        EXPECT_EQ(step, 3);
      } catch (const std::runtime_error&) {
        EXPECT_NE(step, 3);
      }
      if (step < 3) model->zero_grad();
    }
    expect_grads(model->parameters(), expected);
  });
}

// Promise: without grad mode a forward neither communicates nor begins a step.
TEST(ReplicateLife, EvaluationDoesNotCommunicate) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    MLP model = make_mlp();
    replicate(*model);
    const at::Tensor loss = sum_of(model, group->getRank());
    const CommDebugMode comm;
    {
      const c10::NoGradGuard no_grad;
      sum_of(model, 0);
    }
    EXPECT_EQ(comm.total(), 0);
    loss.backward();
    EXPECT_EQ(comm.count(kAllReduce), 1);
    expect_grads(model->parameters(), mean_grads(make_mlp(), 2, sum_of));
  });
}

// Promise: a graph that outlives its module still reduces.
TEST(ReplicateLife, GraphMayOutliveTheModule) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    std::vector<at::Tensor> params;
    at::Tensor loss;
    {
      MLP model = make_mlp();
      replicate(*model);
      params = model->parameters();
      loss = sum_of(model, group->getRank());
    }
    loss.backward();
    expect_grads(params, mean_grads(make_mlp(), 2, sum_of));
  });
}

// Promise: when the module is gone and its graphs are, so is every byte, whenever that was.
TEST(ReplicateLife, LeavesNothingBehind) {
  enum class Until { kReplicate, kForward, kBackward, kSecondForward };
  for (const Until until :
       {Until::kReplicate, Until::kForward, Until::kBackward, Until::kSecondForward}) {
    for (const bool find_unused : {false, true}) {
      const testing::CountingAllocator allocator;
      const int64_t before = allocator.live_bytes();
      run_ranks(2, [&](const ProcessGroupPtr& group) {
        MLP model = make_mlp();
        replicate(*model, {.find_unused_parameters = find_unused});
        if (until == Until::kReplicate) return;
        at::Tensor loss = sum_of(model, group->getRank());
        if (until == Until::kForward) return;
        loss.backward();
        if (until == Until::kBackward) return;
        loss = sum_of(model, group->getRank());
        model = nullptr;
      });
      EXPECT_EQ(allocator.live_bytes(), before) << static_cast<int>(until) << find_unused;
    }
  }
}

}  // namespace
}  // namespace fsdp
