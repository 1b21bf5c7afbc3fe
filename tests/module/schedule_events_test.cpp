#include <torch/nn/modules/container/sequential.h>

#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>

#include "fsdp/fully_shard.h"
#include "fsdp/process_group.h"
#include "support/layouts.h"
#include "support/models.h"
#include "support/recorder.h"

// The order of unshard, reshard and post-backward is part of the interface: these are the event
// lists that PyTorch 2.13's FSDP2 gives for the same models (docs/parity.md).

namespace fsdp {
namespace {

using testing::backward_events;
using testing::forward_events;
using testing::Recorder;
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

class ScheduleEventsTest : public ::testing::TestWithParam<std::tuple<ReshardCase, Layout>> {};

// Promise: forward gathers in order, backward gathers each group while the one after it computes,
// three iterations alike, whether gradients are set to none or to zero.
TEST_P(ScheduleEventsTest, ForwardAndBackward) {
  const auto& [reshard, layout] = GetParam();
  run_ranks(kWorldSize, [&, reshard = reshard, layout = layout](const ProcessGroupPtr&) {
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
TEST_P(ScheduleEventsTest, TwoForwardsOneBackward) {
  const auto& [reshard, layout] = GetParam();
  run_ranks(kWorldSize, [&, reshard = reshard, layout = layout](const ProcessGroupPtr&) {
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

INSTANTIATE_TEST_SUITE_P(Reshard, ScheduleEventsTest,
                         ::testing::Combine(::testing::ValuesIn(kReshardCases), testing::layouts()),
                         [](const auto& info) {
                           return std::get<0>(info.param).name +
                                  ("_" + testing::name_of(std::get<1>(info.param)));
                         });

class ScheduleEvents : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(ScheduleEvents);

// Promise: a part of the outputs that is unused in one backward is prefetched in vain, waits, and
// is there for the next; the end of each backward visits every group.
TEST_P(ScheduleEvents, UnusedInBackward) {
  run_ranks(kWorldSize, [](const ProcessGroupPtr&) {
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
TEST_P(ScheduleEvents, SetModulesToForwardPrefetch) {
  run_ranks(kWorldSize, [](const ProcessGroupPtr&) {
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
TEST_P(ScheduleEvents, SetModulesToBackwardPrefetch) {
  run_ranks(kWorldSize, [](const ProcessGroupPtr&) {
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
TEST_P(ScheduleEvents, BackwardMisprefetch) {
  run_ranks(kWorldSize, [](const ProcessGroupPtr&) {
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

// Promise: an observer is told of every call, whether it is a prefetch, and whether it did
// anything.
TEST_P(ScheduleEvents, PrefetchAndChangedAreTold) {
  struct Flags : ScheduleObserver {
    void on_event(const ScheduleEvent& event) override {
      lines.push_back(std::string(to_string(event.kind)) + " " + event.module_path +
                      (event.prefetch ? " prefetch" : "") + (event.changed ? " changed" : ""));
    }
    std::vector<std::string> lines;
  };
  run_ranks(2, [](const ProcessGroupPtr&) {
    testing::MLP model(4);
    fully_shard(*model->in_proj, {.layout = GetParam()});
    fully_shard(*model->out_proj, {.layout = GetParam()});
    FSDPModule& root = fully_shard(*model, {.layout = GetParam()});
    const auto flags = std::make_shared<Flags>();
    set_schedule_observer(*model, flags);
    const at::Tensor y = model(at::ones({1, 4}).set_requires_grad(true)).sum();
    EXPECT_EQ(flags->lines,
              (std::vector<std::string>{"unshard in_proj changed", "reshard in_proj changed",
                                        "unshard out_proj changed", "reshard out_proj changed"}));
    flags->lines.clear();
    y.backward();
    EXPECT_EQ(flags->lines,
              (std::vector<std::string>{
                  "unshard out_proj changed", "unshard in_proj prefetch changed",
                  "reshard out_proj changed", "post_backward out_proj changed", "unshard in_proj",
                  "reshard in_proj changed", "post_backward in_proj changed"}));
    flags->lines.clear();
    model->in_proj->reshard();
    EXPECT_EQ(flags->lines, (std::vector<std::string>{"reshard in_proj"}));
    flags->lines.clear();
    set_schedule_observer(*model, nullptr);
    root.unshard();
    model->in_proj->unshard();
    EXPECT_TRUE(flags->lines.empty());
  });
}

}  // namespace
}  // namespace fsdp
