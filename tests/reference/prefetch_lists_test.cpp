#include <ATen/ops/arange.h>
#include <ATen/ops/relu.h>
#include <gtest/gtest.h>

#include "fsdp/adamw.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "reference/world.h"
#include "support/layouts.h"
#include "support/models.h"
#include "support/recorder.h"

// Class Prefetch of the reference suite, continued: modules that are sharded in lists.

namespace fsdp {
namespace {

using testing::Recorder;
using testing::run_world;

constexpr int kWorldSize = 4;

class PrefetchLists : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(PrefetchLists);

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
// is freed when its last module has run; the numbers are those of one process. The root has no
// parameters, so its option changes nothing. 2.7.1 lists no reshards.
TEST_P(PrefetchLists, test_fully_shard_multi_module_backward_prefetch) {
  run_world(kWorldSize, [](const ProcessGroupPtr&) {
    for (const bool of_271 : {false, true}) {
      const testing::TransformerOptions sizes{
          .num_layers = 5, .weight_tying = false, .checkpoint_activations = true};
      testing::Transformer model(sizes);
      testing::Transformer reference(sizes);
      testing::init_parameters(*model);
      testing::init_parameters(*reference);
      reference->to(testing::suite_device());
      const FullyShardOptions options = testing::shard_options(GetParam(), true);
      auto& layers = model->blocks;
      fully_shard(*layers[0], options);
      fully_shard({*layers[1], *layers[2]}, options);
      fully_shard({*layers[3], *layers[4]}, options);
      fully_shard({*model->tok_embeddings, *model->pos_embeddings}, options);
      fully_shard({*model->norm, *model->output}, testing::shard_options(GetParam(), false));
      fully_shard(*model, of_271 ? testing::shard_options(GetParam()) : options);
      const auto recorder = std::make_shared<Recorder>(of_271 ? "UP" : "URP");
      set_schedule_observer(*model, recorder);
      AdamW optimizer(parameters(*model), AdamWOptions(1e-2));
      AdamW reference_optimizer(reference->parameters(), AdamWOptions(1e-2));

      const std::string t = "tok_embeddings, pos_embeddings", a = "layers.0",
                        b = "layers.1, layers.2", c = "layers.3, layers.4", n = "norm, output";
      std::vector<std::string> in_forward{"U " + t, "R " + t, "U " + a, "R " + a, "U " + b,
                                          "R " + b, "U " + c, "R " + c, "U " + n};
      std::vector<std::string> in_backward{"U " + c, "R " + n, "P " + n, "U " + b, "R " + c,
                                           "P " + c, "U " + a, "R " + b, "P " + b, "U " + t,
                                           "R " + a, "P " + a, "R " + t, "P " + t};
      if (of_271) {
        in_forward = {"U " + t, "U " + a, "U " + b, "U " + c, "U " + n};
        in_backward = {"U " + c, "P " + n, "U " + b, "P " + c, "U " + a,
                       "P " + b, "U " + t, "P " + a, "P " + t};
      }
      for (int iteration = 0; iteration < 3; ++iteration) {
        const at::Tensor tokens =
            ((at::arange(32).view({2, 16}) * (iteration + 3)) % 8).to(testing::suite_device());
        const at::Tensor expected = reference(tokens).sum();
        const at::Tensor loss = model(tokens).sum();
        EXPECT_NEAR(loss.item<float>(), expected.item<float>(), 1e-4);
        EXPECT_EQ(recorder->take(), forward(in_forward));
        loss.backward();
        EXPECT_EQ(recorder->take(), backward(in_backward));
        expected.backward();
        const auto ours = parameters(*model);
        const auto theirs = reference->parameters();
        for (size_t i = 0; i < ours.size(); ++i) {
          EXPECT_TRUE(
              full_tensor(ours[i].grad()).cpu().allclose(theirs[i].grad().cpu(), 1e-4, 1e-5))
              << i;
        }
        optimizer.step();
        reference_optimizer.step();
        optimizer.zero_grad();
        reference_optimizer.zero_grad();
      }
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

struct UnusedModuleCase {
  const char* name;
  ReshardAfterForward lists;
  bool input_requires_grad;
  std::string kinds;
  std::vector<std::string> in_forward;
  std::vector<std::string> in_backward;
};

const std::string k0 = "0.unused_lin, 0.lin";
const std::string k1 = "1.unused_lin, 1.lin";
// 2.7.1 never ends the forward of such lists: their parameters stay. Here that is what they are
// asked to do. Its backward list is in the order of autograd's visits, so the input requires grad.
const UnusedModuleCase kUnusedModuleCases[] = {
    {"2.13",
     true,
     false,
     "URP",
     {"U ", "U " + k0, "U " + k1, "R " + k1, "R " + k0},
     {"U " + k1, "U " + k0, "R " + k1, "P " + k1, "R ", "P ", "R " + k0, "P " + k0}},
    {"2.7.1, forward",
     true,
     false,
     "UP",
     {"U ", "U " + k0, "U " + k1},
     {"U " + k1, "U " + k0, "P " + k1, "P ", "P " + k0}},
    {"2.7.1, lists that stay",
     false,
     true,
     "UP",
     {"U ", "U " + k0, "U " + k1},
     {"P " + k1, "P " + k0, "P "}},
};

// Promise: a list of which a module never runs ends with the root's forward, latest first, and its
// gradients are those of one process; the module that did not run has none.
TEST_P(PrefetchLists, test_fully_shard_multi_module_unused_module) {
  run_world(kWorldSize, [](const ProcessGroupPtr&) {
    for (const UnusedModuleCase& options : kUnusedModuleCases) {
      SCOPED_TRACE(options.name);
      Halves model;
      Halves reference;
      testing::init_parameters(*model);
      testing::init_parameters(*reference);
      reference->to(testing::suite_device());
      const FullyShardOptions lists = testing::shard_options(GetParam(), options.lists);
      fully_shard({*model->first->unused_lin, *model->first->lin}, lists);
      fully_shard({*model->second->unused_lin, *model->second->lin}, lists);
      fully_shard(*model, testing::shard_options(GetParam()));
      const auto recorder = std::make_shared<Recorder>(options.kinds);
      set_schedule_observer(*model, recorder);
      AdamW optimizer(parameters(*model), AdamWOptions(1e-2));
      AdamW reference_optimizer(reference->parameters(), AdamWOptions(1e-2));
      for (int iteration = 0; iteration < 3; ++iteration) {
        const at::Tensor x = testing::seeded_randn({2, 16}, 42 + iteration)
                                 .set_requires_grad(options.input_requires_grad);
        const at::Tensor loss = model(x).sum();
        EXPECT_EQ(recorder->take(), forward(options.in_forward));
        loss.backward();
        EXPECT_EQ(recorder->take(), backward(options.in_backward));
        reference(x.detach()).sum().backward();
        for (const auto& entry : reference->named_parameters()) {
          const at::Tensor ours = model->named_parameters()[entry.key()].grad();
          ASSERT_EQ(ours.defined(), entry.value().grad().defined()) << entry.key();
          if (!ours.defined()) continue;
          EXPECT_TRUE(full_tensor(ours).cpu().allclose(entry.value().grad().cpu(), 1e-4, 1e-5))
              << entry.key();
        }
        EXPECT_FALSE(model->first->unused_lin->parameters()[0].grad().defined());
        optimizer.step();
        reference_optimizer.step();
        optimizer.zero_grad();
        reference_optimizer.zero_grad();
      }
    }
  });
}

}  // namespace
}  // namespace fsdp
