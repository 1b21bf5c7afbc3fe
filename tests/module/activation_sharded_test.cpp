#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/sgd.h>

#include "fsdp/activation.h"
#include "fsdp/fully_shard.h"
#include "fsdp/process_group.h"
#include "fsdp/sharded_tensor.h"
#include "support/counting_allocator.h"
#include "support/layouts.h"
#include "support/messages.h"
#include "support/recorder.h"
#include "support/training.h"

// checkpoint() and fully_shard() together. B batch, S sequence, D dim.

namespace fsdp {
namespace {

using testing::backward_events;
using testing::forward_events;
using testing::Recorder;

enum class How { kNone, kFunction, kModuleBeforeSharding, kModuleAfterSharding };

// The decoder of the other tests, which may put a checkpoint() around each layer.
struct CheckpointingDecoderImpl : testing::TransformerImpl {
  explicit CheckpointingDecoderImpl(const testing::TransformerOptions& options, How chosen)
      : TransformerImpl(options), how(chosen) {}

  at::Tensor forward(const at::Tensor& tokens_BS) {
    at::Tensor h_BSD = tok_embeddings(tokens_BS) +
                       pos_embeddings(at::arange(tokens_BS.size(1), tokens_BS.options()));
    for (auto& block : blocks) {
      h_BSD = how == How::kFunction ? checkpoint(block, h_BSD) : block(h_BSD);
    }
    return output(norm(h_BSD)).to(at::kFloat);
  }

  How how;
};
FSDP_MODULE(CheckpointingDecoder);

CheckpointingDecoder sharded_decoder(How how, const FullyShardOptions& blocks,
                                     const FullyShardOptions& root) {
  CheckpointingDecoder model(testing::TransformerOptions{.num_layers = 3}, how);
  testing::init_parameters(*model);
  for (auto& block : model->blocks) {
    if (how == How::kModuleBeforeSharding) checkpoint(*block);
    fully_shard(*block, blocks);
    if (how == How::kModuleAfterSharding) checkpoint(*block);
  }
  fully_shard(*model, root);
  return model;
}

at::Tensor tokens(int64_t seed = 0) {
  return (at::arange(2 * 16, at::kLong) * 7 + seed).remainder(8).view({2, 16});
}

struct ReshardCase {
  const char* name;
  ReshardAfterForward blocks;
  ReshardAfterForward root;
  bool blocks_reshard;
  bool root_reshards;
};
const ReshardCase kReshardCases[] = {{"True_root_unset", true, {}, true, false},
                                     {"True", true, true, true, true},
                                     {"Two", int64_t{2}, int64_t{2}, true, true},
                                     {"False", false, false, false, false}};
const char* const kHowNames[] = {"None", "Function", "ModuleBefore", "ModuleAfter"};

class CheckpointEvents : public ::testing::TestWithParam<std::tuple<ReshardCase, How, Layout>> {};

// Promise: checkpoint() on each layer does not change what is gathered and reduced, and when.
TEST_P(CheckpointEvents, AreThoseWithoutCheckpoint) {
  const auto& [reshard, how, layout] = GetParam();
  run_ranks(4, [&, reshard = reshard, how = how, layout = layout](const ProcessGroupPtr&) {
    CheckpointingDecoder model =
        sharded_decoder(how, {.reshard_after_forward = reshard.blocks, .layout = layout},
                        {.reshard_after_forward = reshard.root, .layout = layout});
    const auto recorder = std::make_shared<Recorder>();
    set_schedule_observer(*model, recorder);
    for (int iteration = 0; iteration < 3; ++iteration) {
      const at::Tensor loss = model(tokens()).sum();
      EXPECT_EQ(recorder->take(), forward_events("U- UL0 UL1 UL2"));
      loss.backward();
      std::string expected =
          reshard.blocks_reshard ? "UL2 UL1 PL2 UL0 PL1 PL0 P-" : "PL2 PL1 PL0 P-";
      if (reshard.root_reshards) expected = "U- " + expected;
      EXPECT_EQ(recorder->take(), backward_events(expected)) << "in iteration " << iteration;
      for (auto& param : model->parameters()) param.mutable_grad().reset();
    }
    // Two forwards before one backward: two visits per group, latest first.
    const at::Tensor loss1 = model(tokens());
    const at::Tensor loss2 = model(tokens(3));
    recorder->take();
    (loss1 + loss2).sum().backward();
    const std::string first_half =
        reshard.blocks_reshard ? "UL2 UL1 PL2 UL0 PL1 PL0" : "PL2 PL1 PL0";
    EXPECT_EQ(recorder->take(), backward_events((reshard.root_reshards ? "U- " : "") + first_half +
                                                " UL2 UL1 PL2 UL0 PL1 PL0 P-"));
  });
}

// Promise: losses and weights of a few steps are bit-equal to those without checkpoint().
TEST_P(CheckpointEvents, TrainingIsBitEqual) {
  const auto& [reshard, how, layout] = GetParam();
  if (how == How::kNone) return;
  run_ranks(3, [&, reshard = reshard, how = how, layout = layout](const ProcessGroupPtr& group) {
    if (std::holds_alternative<int64_t>(reshard.blocks)) return;  // 2 does not divide 3
    const auto train = [&](How how) {
      CheckpointingDecoder model =
          sharded_decoder(how, {.reshard_after_forward = reshard.blocks, .layout = layout},
                          {.reshard_after_forward = reshard.root, .layout = layout});
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2));
      std::vector<at::Tensor> results;
      for (int step = 0; step < 3; ++step) {
        const at::Tensor loss = model(tokens(step + group->getRank())).square().mean();
        loss.backward();
        results.push_back(loss.detach());
        for (const at::Tensor& param : model->parameters()) results.push_back(param.grad().clone());
        optimizer.step();
        optimizer.zero_grad();
      }
      return results;
    };
    const auto expected = train(How::kNone);
    const auto ours = train(how);
    ASSERT_EQ(ours.size(), expected.size());
    for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::equal(ours[i], expected[i])) << i;
  });
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointEvents,
                         ::testing::Combine(::testing::ValuesIn(kReshardCases),
                                            ::testing::Values(How::kNone, How::kFunction,
                                                              How::kModuleBeforeSharding,
                                                              How::kModuleAfterSharding),
                                            testing::layouts()),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + std::string("_") +
                                  kHowNames[static_cast<int>(std::get<1>(info.param))] + "_" +
                                  testing::name_of(std::get<2>(info.param));
                         });

class CheckpointSharded : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(CheckpointSharded);

constexpr int64_t kDim = 6;

// Layers that are sharded one by one, below a module that computes them in one checkpoint().
struct NestImpl : torch::nn::Module {
  NestImpl() {
    first = register_module("first", testing::MLP(kDim));
    last = register_module("last", testing::MLP(kDim));
    testing::init_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto both = [this](const at::Tensor& t) { return last(first(t).sin()).cos(); };
    return checkpointed ? checkpoint({.early_stop = early_stop}, both, x) : both(x);
  }
  bool checkpointed = false;
  bool early_stop = true;
  testing::MLP first{nullptr}, last{nullptr};
};
FSDP_MODULE(Nest);

Nest sharded_nest(Layout layout, bool checkpointed, bool early_stop = true) {
  Nest nest;
  nest->checkpointed = checkpointed;
  nest->early_stop = early_stop;
  for (const auto& mlp : {nest->first, nest->last}) {
    testing::MLP module = mlp;
    fully_shard(*module->in_proj, {.reshard_after_forward = true, .layout = layout});
    fully_shard(*module->out_proj, {.reshard_after_forward = true, .layout = layout});
  }
  fully_shard(*nest, {.reshard_after_forward = true, .layout = layout});
  return nest;
}

std::vector<at::Tensor> take_grads(torch::nn::Module& module) {
  std::vector<at::Tensor> grads;
  for (at::Tensor& param : module.parameters()) {
    grads.push_back(std::exchange(param.mutable_grad(), {}));
  }
  return grads;
}

void expect_bit_equal(const std::vector<at::Tensor>& ours,
                      const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    ASSERT_TRUE(ours[i].defined() && expected[i].defined()) << i;
    EXPECT_TRUE(at::equal(ours[i], expected[i])) << i;
  }
}

at::Tensor input_of(const ProcessGroupPtr& group, int64_t step) {
  return (at::arange(2 * kDim, at::kFloat) * 0.1 + group->getRank() + step).sin().view({2, kDim});
}

// Promise: sharded modules inside of a checkpoint() are gathered for its recomputation, stay so
// until their turn in backward, and give the same gradients: with one forward and with two.
TEST_P(CheckpointSharded, ShardedChildren) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    for (const int num_forwards : {1, 2}) {
      for (const bool early_stop : {true, false}) {
        Nest plain = sharded_nest(GetParam(), /*checkpointed=*/false);
        Nest nest = sharded_nest(GetParam(), /*checkpointed=*/true, early_stop);
        for (int step = 0; step < 3; ++step) {
          const auto backward = [&](Nest& model) {
            at::Tensor loss = model(input_of(group, step).requires_grad_()).sum();
            if (num_forwards == 2) loss = loss + model(input_of(group, step + 5)).square().sum();
            loss.backward();
            return take_grads(*model);
          };
          expect_bit_equal(backward(nest), backward(plain));
        }
      }
    }
  });
}

// Promise: the gathers of such a recomputation are of state FORWARD, and backward needs no more.
TEST_P(CheckpointSharded, EventsOfShardedChildren) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    Nest nest = sharded_nest(GetParam(), /*checkpointed=*/true);
    const auto recorder = std::make_shared<Recorder>("URP");
    set_schedule_observer(*nest, recorder);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor loss = nest(input_of(group, step).requires_grad_()).sum();
      recorder->take();
      loss.backward();
      const std::vector<std::string> events = recorder->take();
      const std::vector<std::string> expected{
          "U 'first.in_proj' FORWARD",        "U 'first.out_proj' FORWARD",
          "U 'last.in_proj' FORWARD",         "U 'last.out_proj' FORWARD",
          "R 'last.out_proj' POST_BACKWARD",  "P 'last.out_proj' POST_BACKWARD",
          "R 'last.in_proj' POST_BACKWARD",   "P 'last.in_proj' POST_BACKWARD",
          "R 'first.out_proj' POST_BACKWARD", "P 'first.out_proj' POST_BACKWARD",
          "R 'first.in_proj' POST_BACKWARD",  "P 'first.in_proj' POST_BACKWARD"};
      EXPECT_EQ(events, expected);
    }
  });
}

// A module that calls itself, and so is left in the middle of two forwards by an early stop.
struct CountdownImpl : torch::nn::Module {
  CountdownImpl() {
    linear = register_module("linear", torch::nn::Linear(kDim, kDim));
    testing::init_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x, int depth);
  torch::nn::Linear linear{nullptr};
};
FSDP_MODULE(Countdown);
at::Tensor CountdownImpl::forward(const at::Tensor& x, int depth) {
  if (depth == 0) return linear(x).sin();
  return (*dynamic_cast<Countdown::Impl*>(this)).forward(linear(x).tanh(), depth - 1) + 1;
}

// Promise: a recomputation that stops early within nested forwards of one module leaves the next
// step as it should be.
TEST_P(CheckpointSharded, EarlyStopInNestedForwards) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    struct ModelImpl : torch::nn::Module {
      ModelImpl() {
        countdown = register_module("countdown", Countdown());
        last = register_module("last", fsdp::nn::Linear(kDim, kDim));
      }
      at::Tensor forward(const at::Tensor& x) {
        const auto function = [this](const at::Tensor& t) {
          const at::Tensor y = t.exp();  // whose backward recomputes, and not the unused forward's
          const at::Tensor unused = countdown(t, 1);
          return uses_both ? y + unused : y;
        };
        return last(checkpointed ? checkpoint(function, x) : function(x));
      }
      bool checkpointed = false;
      bool uses_both = false;
      Countdown countdown{nullptr};
      fsdp::nn::Linear last{nullptr};
    };
    FSDP_MODULE(Model);
    const auto events_and_grads = [&](bool checkpointed) {
      Model model;
      testing::init_parameters(*model);
      model->checkpointed = checkpointed;
      const FullyShardOptions options{.reshard_after_forward = true, .layout = GetParam()};
      fully_shard(*model->countdown, options);
      fully_shard(*model->last, options);
      fully_shard(*model, options);
      const auto recorder = std::make_shared<Recorder>("URP");
      set_schedule_observer(*model, recorder);
      std::pair<std::vector<std::vector<std::string>>, std::vector<at::Tensor>> result;
      for (int step = 0; step < 3; ++step) {
        model->uses_both = step == 2;
        at::Tensor loss = model(input_of(group, step).requires_grad_()).sum();
        result.first.push_back(recorder->take());
        loss.backward();
        recorder->take();
        result.second = take_grads(*model);
      }
      return result;
    };
    const auto expected = events_and_grads(false);
    const auto ours = events_and_grads(true);
    EXPECT_EQ(ours.first, expected.first);
    expect_bit_equal(ours.second, expected.second);
  });
}

// Promise: with mixed precision the checkpointed forward, and its recomputation, get cast inputs.
TEST_P(CheckpointSharded, RecomputationGetsCastInputs) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    struct SpyImpl : torch::nn::Module {
      SpyImpl() { linear = register_module("linear", torch::nn::Linear(kDim, kDim)); }
      at::Tensor forward(const at::Tensor& x) {
        dtypes.push_back(x.scalar_type());
        return linear(x).tanh();
      }
      torch::nn::Linear linear{nullptr};
      std::vector<at::ScalarType> dtypes;
    };
    FSDP_MODULE(Spy);
    Spy spy;
    checkpoint(*spy);
    fully_shard(*spy, {.reshard_after_forward = true,
                       .mp_policy = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat},
                       .layout = GetParam()});
    const at::Tensor y = spy(input_of(group, 0));
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    y.sum().backward();
    EXPECT_EQ(spy->dtypes, (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16}));
    for (const at::Tensor& param : spy->parameters()) EXPECT_TRUE(param.grad().defined());
  });
}

// Promise: checkpointed blocks of a model that is sharded as one group.
TEST_P(CheckpointSharded, BlocksOfOneGroup) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto grads = [&](bool checkpointed) {
      testing::MLP first(kDim), last(kDim);
      fsdp::nn::Sequential model({{"first", first}, {"last", last}});
      testing::init_parameters(*model);
      if (checkpointed) {
        checkpoint(*first);
        checkpoint(*last);
      }
      fully_shard(*model, {.reshard_after_forward = true, .layout = GetParam()});
      model(input_of(group, 0)).square().sum().backward();
      return take_grads(*model);
    };
    expect_bit_equal(grads(true), grads(false));
  });
}

// Promise: an error in recomputation ends backward; the next step of every rank is as ever.
TEST_P(CheckpointSharded, ErrorsInRecomputation) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    struct FaultyImpl : torch::nn::Module {
      FaultyImpl() { linear = register_module("linear", fsdp::nn::Linear(kDim, kDim)); }
      at::Tensor forward(const at::Tensor& x) {
        const at::Tensor y = linear(x);
        FSDP_CHECK(StateError, ++calls != 2, "the second call");
        return y.tanh();
      }
      int calls = 0;
      fsdp::nn::Linear linear{nullptr};
    };
    FSDP_MODULE(Faulty);
    Faulty model;
    testing::init_parameters(*model);
    checkpoint(*model);
    const FullyShardOptions options{.reshard_after_forward = true, .layout = GetParam()};
    fully_shard(*model->linear, options);
    fully_shard(*model, options);
    const at::Tensor loss = model(input_of(group, 0)).sum();
    testing::expect_message<StateError>([&] { loss.backward(); }, "the second call");
    model(input_of(group, 0)).sum().backward();
    const auto grads = take_grads(*model);
    model(input_of(group, 0)).sum().backward();
    expect_bit_equal(take_grads(*model), grads);
  });
}

// Promise: neither checkpoint() nor offload_activations() keeps the parameters of a group, nor does
// offloading copy them.
TEST_P(CheckpointSharded, ParametersAreFreedAfterForward) {
  constexpr int64_t kWide = 128;
  const testing::CountingAllocator allocator;
  for (const bool offload : {false, true}) {
    run_ranks(1, [&](const ProcessGroupPtr&) {
      testing::MLP mlp(kWide);
      mlp->in_proj->weight.set_requires_grad(false);  // then its view is no parameter's to autograd
      checkpoint(*mlp, {.preserve_rng_state = false, .offload_to_host = offload});
      const FullyShardOptions options{.reshard_after_forward = true, .layout = GetParam()};
      fully_shard(*mlp, options);
      const at::Tensor x = at::ones({1, kWide}).set_requires_grad(true);
      mlp(x).sum().backward();
      take_grads(*mlp);
      mlp->release_buffers();
      const int64_t before = allocator.live_bytes();
      const at::Tensor y = mlp(x);
      mlp->release_buffers();
      // Activations: the result, or with that the two of relu and a copy of the input.
      const int64_t activations = 4 * kWide * (offload ? 1 + 4 + 1 + 1 : 1);
      EXPECT_LE(allocator.live_bytes() - before, activations);
      y.sum().backward();
    });
  }
}

}  // namespace
}  // namespace fsdp
