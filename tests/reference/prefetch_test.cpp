#include <torch/nn/modules/container/sequential.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>

#include "fsdp/adamw.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "reference/world.h"
#include "support/layouts.h"
#include "support/models.h"
#include "support/recorder.h"

// Class Prefetch of the reference suite: the order of unshard, reshard and post-backward is part of
// the interface. These are the lists that PyTorch 2.13's FSDP2 gives for the same models; with the
// root's option unset they are those of 2.7.1 too (docs/parity.md).

namespace fsdp {
namespace {

using testing::backward_events;
using testing::forward_events;
using testing::Recorder;
using testing::run_world;
using testing::Transformer;

constexpr int kWorldSize = 4;

Transformer sharded_transformer(int64_t num_layers, const ReshardAfterForward& blocks,
                                const ReshardAfterForward& root, Layout layout) {
  Transformer model(testing::TransformerOptions{.num_layers = num_layers});
  for (auto& block : model->blocks)
    fully_shard(*block, {.reshard_after_forward = blocks, .layout = layout});
  fully_shard(*model, {.reshard_after_forward = root, .layout = layout});
  return model;
}

at::Tensor tokens() { return at::randint(0, 8, {2, 16}, at::kLong); }

struct ReshardCase {
  const char* name;
  ReshardAfterForward blocks;
  ReshardAfterForward root;
  bool blocks_reshard;
  bool root_reshards;
};

const ReshardCase kReshardCases[] = {{"True_root_unset", true, {}, true, false},
                                     {"True", true, true, true, true},
                                     {"Two_root_unset", int64_t{2}, {}, true, false},
                                     {"Two", int64_t{2}, int64_t{2}, true, true},
                                     {"Unset", {}, {}, true, false},
                                     {"False", false, false, false, false}};

class BackwardPrefetch : public ::testing::TestWithParam<std::tuple<ReshardCase, Layout>> {};

// Promise: forward gathers in order, backward gathers each group while the one after it computes,
// three iterations alike, whether gradients are set to none or to zero.
TEST_P(BackwardPrefetch, test_fully_shard_backward_prefetch_forward_backward) {
  const auto& [reshard, layout] = GetParam();
  run_world(kWorldSize, [&, reshard = reshard, layout = layout](const ProcessGroupPtr&) {
    Transformer model = sharded_transformer(3, reshard.blocks, reshard.root, layout);
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
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
      optimizer.step();
      optimizer.zero_grad(/*set_to_none=*/iteration % 2 == 0);
    }
  });
}

// Promise: two forwards before one backward give two visits per group, latest first.
TEST_P(BackwardPrefetch, test_fully_shard_backward_prefetch_multi_forward) {
  const auto& [reshard, layout] = GetParam();
  run_world(kWorldSize, [&, reshard = reshard, layout = layout](const ProcessGroupPtr&) {
    Transformer model = sharded_transformer(3, reshard.blocks, reshard.root, layout);
    const auto recorder = std::make_shared<Recorder>();
    set_schedule_observer(*model, recorder);
    for (int iteration = 0; iteration < 3; ++iteration) {
      const at::Tensor loss1 = model(tokens());
      const at::Tensor loss2 = model(tokens());
      std::string forward = "U- UL0 UL1 UL2";
      if (reshard.blocks_reshard)
        forward += reshard.root_reshards ? " U- UL0 UL1 UL2" : " UL0 UL1 UL2";
      EXPECT_EQ(recorder->take(), forward_events(forward));
      (loss1 + loss2).sum().backward();
      const std::string first_half =
          reshard.blocks_reshard ? "UL2 UL1 PL2 UL0 PL1 PL0" : "PL2 PL1 PL0";
      EXPECT_EQ(recorder->take(), backward_events((reshard.root_reshards ? "U- " : "") +
                                                  first_half + " UL2 UL1 PL2 UL0 PL1 PL0 P-"));
      for (auto& param : model->parameters()) param.mutable_grad().reset();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Reshard, BackwardPrefetch,
                         ::testing::Combine(::testing::ValuesIn(kReshardCases), testing::layouts()),
                         [](const auto& info) {
                           return std::get<0>(info.param).name +
                                  ("_" + testing::name_of(std::get<1>(info.param)));
                         });

class Prefetch : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(Prefetch);

// Promise: a part of the outputs that is unused in one backward is prefetched in vain, waits, and
// is there for the next; the end of each backward visits every group.
TEST_P(Prefetch, test_fully_shard_backward_prefetch_unused_in_backward) {
  run_world(kWorldSize, [](const ProcessGroupPtr&) {
    struct NetImpl : torch::nn::Module {
      NetImpl() {
        first = register_module("0", fsdp::nn::Linear(8, 8));
        second = register_module("1", testing::DoubleLinear(8));
      }
      std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return second(first(x)); }
      fsdp::nn::Linear first{nullptr};
      testing::DoubleLinear second{nullptr};
    };
    FSDP_MODULE(Net);
    Net model;
    fully_shard(*model->first, {.layout = GetParam()});
    fully_shard(*model->second->lin1, {.layout = GetParam()});
    fully_shard(*model->second->lin2, {.layout = GetParam()});
    FSDPModule& root = fully_shard(*model, {.reshard_after_forward = true, .layout = GetParam()});
    for (FSDPModule* module :
         {static_cast<FSDPModule*>(&*model->first), static_cast<FSDPModule*>(&*model->second->lin1),
          static_cast<FSDPModule*>(&*model->second->lin2)}) {
      module->set_reshard_after_forward(true);
    }
    const auto recorder = std::make_shared<Recorder>();
    set_schedule_observer(*model, recorder);

    const auto [loss1, loss2] = model(at::randn({4, 8}));
    EXPECT_EQ(recorder->take(), forward_events("U0 U1.lin1 U1.lin2"));
    root.set_is_last_backward(false);
    loss2.sum().backward({}, /*retain_graph=*/true);
    EXPECT_EQ(recorder->take(), backward_events("U1.lin2 U1.lin1 P1.lin2 U0 P0 P1.lin1"));
    root.set_is_last_backward(true);
    loss1.sum().backward();
    EXPECT_EQ(recorder->take(), backward_events("U0 P1.lin1 P0 P1.lin2"));
  });
}

// Promise: explicit forward prefetch changes the order of gathers as asked, and nothing else.
TEST_P(Prefetch, test_set_modules_to_forward_prefetch) {
  run_world(kWorldSize, [](const ProcessGroupPtr&) {
    for (const bool explicit_root : {false, true}) {
      Transformer model = sharded_transformer(
          4, true, explicit_root ? ReshardAfterForward(true) : ReshardAfterForward(), GetParam());
      auto& layers = model->blocks;
      const auto recorder = std::make_shared<Recorder>("URP");
      set_schedule_observer(*model, recorder);
      const std::string root_reshard = explicit_root ? " R-" : "";
      const std::string root_unshard = explicit_root ? "U- " : "";
      const std::string backward =
          root_unshard + "UL3 UL2 RL3 PL3 UL1 RL2 PL2 UL0 RL1 PL1 RL0 PL0 R- P-";

      for (size_t i = 0; i < 3; ++i) layers[i]->set_modules_to_forward_prefetch({&*layers[i + 1]});
      at::Tensor loss = model(tokens()).sum();
      EXPECT_EQ(recorder->take(),
                forward_events("U- UL0 UL1 RL0 UL2 RL1 UL3 RL2 RL3" + root_reshard));
      loss.backward();
      EXPECT_EQ(recorder->take(), backward_events(backward));

      for (size_t i = 0; i < 2; ++i) {
        layers[i]->set_modules_to_forward_prefetch({&*layers[i + 1], &*layers[i + 2]});
      }
      loss = model(tokens()).sum();
      EXPECT_EQ(recorder->take(),
                forward_events("U- UL0 UL1 UL2 RL0 UL3 RL1 RL2 RL3" + root_reshard));
      loss.backward();
      EXPECT_EQ(recorder->take(), backward_events(backward));
    }
  });
}

// Promise: an explicit backward list takes the place of the default prefetch, for that module.
TEST_P(Prefetch, test_set_modules_to_backward_prefetch) {
  run_world(kWorldSize, [](const ProcessGroupPtr&) {
    for (const bool explicit_root : {false, true}) {
      Transformer model = sharded_transformer(
          4, true, explicit_root ? ReshardAfterForward(true) : ReshardAfterForward(), GetParam());
      auto& layers = model->blocks;
      const auto recorder = std::make_shared<Recorder>("URP");
      set_schedule_observer(*model, recorder);
      const std::string forward =
          std::string("U- UL0 RL0 UL1 RL1 UL2 RL2 UL3 RL3") + (explicit_root ? " R-" : "");
      const std::string root_unshard = explicit_root ? "U- " : "";

      for (size_t i = 1; i < 4; ++i) layers[i]->set_modules_to_backward_prefetch({&*layers[i - 1]});
      at::Tensor loss = model(tokens()).sum();
      EXPECT_EQ(recorder->take(), forward_events(forward));
      loss.backward();
      EXPECT_EQ(
          recorder->take(),
          backward_events(root_unshard + "UL3 UL2 RL3 PL3 UL1 RL2 PL2 UL0 RL1 PL1 RL0 PL0 R- P-"));

      for (size_t i = 2; i < 4; ++i) {
        layers[i]->set_modules_to_backward_prefetch({&*layers[i - 1], &*layers[i - 2]});
      }
      loss = model(tokens()).sum();
      EXPECT_EQ(recorder->take(), forward_events(forward));
      loss.backward();
      EXPECT_EQ(
          recorder->take(),
          backward_events(root_unshard + "UL3 UL2 UL1 RL3 PL3 UL0 RL2 PL2 RL1 PL1 RL0 PL0 R- P-"));
    }
  });
}

// Promise: a gather for the wrong direction is used by nobody, waited for at the end of backward
// and dropped; numbers stay those of one process.
TEST_P(Prefetch, test_backward_misprefetch) {
  run_world(kWorldSize, [](const ProcessGroupPtr&) {
    testing::MLP reference(16);
    testing::MLP model(16);
    testing::init_parameters(*reference);
    testing::init_parameters(*model);
    for (auto* linear : {&model->in_proj, &model->out_proj}) {
      fully_shard(**linear, {.reshard_after_forward = true, .layout = GetParam()});
    }
    fully_shard(*model, {.layout = GetParam()});
    model->in_proj->set_modules_to_backward_prefetch({&*model->out_proj});
    torch::optim::Adam reference_optimizer(reference->parameters(),
                                           torch::optim::AdamOptions(1e-2));
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
    const auto recorder = std::make_shared<Recorder>("URP");
    set_schedule_observer(*model, recorder);
    for (int iteration = 0; iteration < 3; ++iteration) {
      const at::Tensor x = at::ones({2, 16}) * (iteration + 1);
      const at::Tensor expected = reference(x).sum();
      const at::Tensor loss = model(x).sum();
      EXPECT_NEAR(loss.item<float>(), expected.item<float>(), 1e-5 * expected.item<float>());
      EXPECT_EQ(recorder->take(), forward_events("Uin_proj Rin_proj Uout_proj Rout_proj"));
      expected.backward();
      loss.backward();
      EXPECT_EQ(
          recorder->take(),
          backward_events("Uout_proj Uin_proj Rout_proj Pout_proj Uout_proj Rin_proj Pin_proj"));
      reference_optimizer.step();
      optimizer.step();
      reference_optimizer.zero_grad();
      optimizer.zero_grad();
    }
  });
}

// "U layers.1, layers.2" and so on: names with commas, one line an event.
std::vector<std::string> lines(const std::vector<std::string>& events, const char* unshard,
                               const char* other) {
  std::vector<std::string> result;
  for (const std::string& event : events) {
    result.push_back(event.substr(0, 1) + " '" + event.substr(2) + "' " +
                     (event[0] == 'U' ? unshard : other));
  }
  return result;
}

std::vector<std::string> forward(const std::vector<std::string>& events) {
  return lines(events, "FORWARD", "FORWARD");
}
std::vector<std::string> backward(const std::vector<std::string>& events) {
  return lines(events, "PRE_BACKWARD", "POST_BACKWARD");
}

// Promise: FSDP2's event lists for lists of modules, which are named by all of their paths; a group
// is freed when its last module has run; the numbers are those of one process.
TEST_P(Prefetch, test_fully_shard_multi_module_backward_prefetch) {
  run_world(kWorldSize, [](const ProcessGroupPtr&) {
    const testing::TransformerOptions sizes{.num_layers = 5, .weight_tying = false};
    testing::Transformer model(sizes);
    testing::Transformer reference(sizes);
    testing::init_parameters(*model);
    testing::init_parameters(*reference);
    const FullyShardOptions options{.reshard_after_forward = true, .layout = GetParam()};
    auto& layers = model->blocks;
    fully_shard(*layers[0], options);
    fully_shard({*layers[1], *layers[2]}, options);
    fully_shard({*layers[3], *layers[4]}, options);
    fully_shard({*model->tok_embeddings, *model->pos_embeddings}, options);
    fully_shard({*model->norm, *model->output},
                {.reshard_after_forward = false, .layout = GetParam()});
    fully_shard(*model, options);
    const auto recorder = std::make_shared<Recorder>("URP");
    set_schedule_observer(*model, recorder);
    AdamW optimizer(parameters(*model), AdamWOptions(1e-2));
    AdamW reference_optimizer(reference->parameters(), AdamWOptions(1e-2));

    const std::string t = "tok_embeddings, pos_embeddings", a = "layers.0",
                      b = "layers.1, layers.2", c = "layers.3, layers.4", n = "norm, output";
    for (int iteration = 0; iteration < 3; ++iteration) {
      const at::Tensor tokens = (at::arange(32).view({2, 16}) * (iteration + 3)) % 8;
      const at::Tensor expected = reference(tokens).sum();
      const at::Tensor loss = model(tokens).sum();
      EXPECT_NEAR(loss.item<float>(), expected.item<float>(), 1e-4);
      EXPECT_EQ(recorder->take(), forward({"U " + t, "R " + t, "U " + a, "R " + a, "U " + b,
                                           "R " + b, "U " + c, "R " + c, "U " + n}));
      loss.backward();
      EXPECT_EQ(recorder->take(),
                backward({"U " + c, "R " + n, "P " + n, "U " + b, "R " + c, "P " + c, "U " + a,
                          "R " + b, "P " + b, "U " + t, "R " + a, "P " + a, "R " + t, "P " + t}));
      expected.backward();
      const auto ours = parameters(*model);
      const auto theirs = reference->parameters();
      for (size_t i = 0; i < ours.size(); ++i) {
        EXPECT_TRUE(full_tensor(ours[i].grad()).allclose(theirs[i].grad(), 1e-4, 1e-5)) << i;
      }
      optimizer.step();
      reference_optimizer.step();
      optimizer.zero_grad();
      reference_optimizer.zero_grad();
    }
  });
}

// Its first linear never runs.
struct HalfUsedImpl : torch::nn::Module {
  HalfUsedImpl() {
    unused_lin = register_module("unused_lin", fsdp::nn::Linear(1, 1));
    lin = register_module("lin", fsdp::nn::Linear(16, 16));
  }
  at::Tensor forward(const at::Tensor& x) { return lin(x).relu(); }
  fsdp::nn::Linear unused_lin{nullptr};
  fsdp::nn::Linear lin{nullptr};
};
FSDP_MODULE(HalfUsed);

struct HalvesImpl : torch::nn::Module {
  HalvesImpl() {
    first = register_module("0", HalfUsed());
    second = register_module("1", HalfUsed());
    last = register_module("2", fsdp::nn::Linear(16, 16));
  }
  at::Tensor forward(const at::Tensor& x) { return last(second(first(x))); }
  HalfUsed first{nullptr};
  HalfUsed second{nullptr};
  fsdp::nn::Linear last{nullptr};
};
FSDP_MODULE(Halves);

// Promise: a list of which a module never runs ends with the root's forward, latest first, and its
// gradients are those of one process; the module that did not run has none.
TEST_P(Prefetch, test_fully_shard_multi_module_unused_module) {
  run_world(kWorldSize, [](const ProcessGroupPtr& group) {
    Halves model;
    Halves reference;
    testing::init_parameters(*model);
    testing::init_parameters(*reference);
    const FullyShardOptions options{.reshard_after_forward = true, .layout = GetParam()};
    fully_shard({*model->first->unused_lin, *model->first->lin}, options);
    fully_shard({*model->second->unused_lin, *model->second->lin}, options);
    fully_shard(*model, {.layout = GetParam()});
    const auto recorder = std::make_shared<Recorder>("URP");
    set_schedule_observer(*model, recorder);
    AdamW optimizer(parameters(*model), AdamWOptions(1e-2));
    AdamW reference_optimizer(reference->parameters(), AdamWOptions(1e-2));
    const std::string m0 = "0.unused_lin, 0.lin", m1 = "1.unused_lin, 1.lin";
    for (int iteration = 0; iteration < 3; ++iteration) {
      const at::Tensor x = at::ones({2, 16}) * (iteration + 1);
      const at::Tensor loss = model(x).sum();
      EXPECT_EQ(recorder->take(), forward({"U ", "U " + m0, "U " + m1, "R " + m1, "R " + m0}));
      loss.backward();
      EXPECT_EQ(recorder->take(), backward({"U " + m1, "U " + m0, "R " + m1, "P " + m1, "R ", "P ",
                                            "R " + m0, "P " + m0}));
      reference(x).sum().backward();
      for (const auto& entry : reference->named_parameters()) {
        const at::Tensor ours = model->named_parameters()[entry.key()].grad();
        ASSERT_EQ(ours.defined(), entry.value().grad().defined()) << entry.key();
        if (!ours.defined()) continue;
        EXPECT_TRUE(full_tensor(ours).allclose(entry.value().grad(), 1e-4, 1e-5)) << entry.key();
      }
      EXPECT_FALSE(model->first->unused_lin->parameters()[0].grad().defined());
      optimizer.step();
      reference_optimizer.step();
      optimizer.zero_grad();
      reference_optimizer.zero_grad();
    }
  });
}

}  // namespace
}  // namespace fsdp
