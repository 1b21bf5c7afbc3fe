#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "fsdp/adamw.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "support/layouts.h"
#include "support/messages.h"
#include "support/models.h"
#include "support/recorder.h"

// fully_shard({a, b}): modules that are gathered, freed and reduced together.

namespace fsdp {
namespace {

using testing::expect_message;
using testing::Recorder;

class ModuleListsTest : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(ModuleListsTest);

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
TEST_P(ModuleListsTest, EventsAndNumbers) {
  run_ranks(4, [](const ProcessGroupPtr&) {
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
TEST_P(ModuleListsTest, ModuleThatNeverRuns) {
  run_ranks(4, [](const ProcessGroupPtr& group) {
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

// The head is left to the caller, who runs it on pieces of the hidden states.
struct ChunkedImpl : torch::nn::Module {
  ChunkedImpl() {
    body = register_module("body", fsdp::nn::Linear(4, 4));
    norm = register_module("norm", fsdp::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    head = register_module("head", fsdp::nn::Linear(4, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(body(x)); }
  fsdp::nn::Linear body{nullptr};
  fsdp::nn::LayerNorm norm{nullptr};
  fsdp::nn::Linear head{nullptr};
};
FSDP_MODULE(Chunked);

// Promise: a module of a list that is called on its own for each piece of the loss, with a backward
// each, gives the gradients of one process.
TEST_P(ModuleListsTest, ChunkedLoss) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    Chunked model;
    Chunked reference;
    testing::init_parameters(*model);
    testing::init_parameters(*reference);
    fully_shard(*model->body, {.layout = GetParam()});
    fully_shard({*model->norm, *model->head}, {.layout = GetParam()});
    fully_shard(*model, {.layout = GetParam()});
    const auto run = [](Chunked& chunked) {
      const at::Tensor hidden = chunked(at::ones({6, 4}) * at::arange(1, 7).unsqueeze(1));
      at::Tensor leaf = hidden.detach().set_requires_grad(true);
      for (int64_t i = 0; i < 3; ++i) {
        chunked->head(leaf.narrow(0, 2 * i, 2)).square().sum().backward();
      }
      hidden.backward(leaf.grad());
    };
    for (int step = 0; step < 2; ++step) {
      run(model);
      run(reference);
    }
    const auto ours = parameters(*model);
    const auto expected = reference->parameters();
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(full_tensor(ours[i].grad()).allclose(expected[i].grad(), 1e-4, 1e-5)) << i;
    }
  });
}

// Promise: lists that make no group are refused before anything changes, and a list is no root.
TEST_P(ModuleListsTest, RefusesBadLists) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    testing::MLP model(4);
    const std::vector<std::reference_wrapper<torch::nn::Module>> none;
    expect_message<ConfigError>([&] { fully_shard(none); }, "the list of modules is empty");
    expect_message<ConfigError>(
        [&] {
          fully_shard({*model->in_proj, *model->in_proj});
        },
        "is twice in the list");
    torch::nn::Linear plain(4, 4);
    expect_message<ConfigError>(
        [&] {
          fully_shard({*model->in_proj, *plain});
        },
        "runs no hooks around forward");
    EXPECT_FALSE(model->in_proj->is_fully_sharded());

    fully_shard({*model->in_proj, *model->out_proj}, {.layout = GetParam()});
    expect_message<ConfigError>([&] { fully_shard({*model->in_proj, *model}); }, "sharded already");
    expect_message<StateError>([&] { model(at::ones({1, 4})); }, "a list cannot be the root");

    // The tied weight belongs to two modules that would be gathered at different times.
    testing::Transformer tied(testing::TransformerOptions{.weight_tying = true});
    fully_shard({*tied->tok_embeddings, *tied->pos_embeddings}, {.layout = GetParam()});
    expect_message<ConfigError>(
        [&] {
          fully_shard({*tied->norm, *tied->output}, {.layout = GetParam()});
        },
        "is shared with a module that was sharded on its own");
  });
}

// Promise: a module of the list that lies below another is that one's; methods work on any of them.
TEST_P(ModuleListsTest, ModulesBelowOthers) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    Halves model;
    Halves reference;
    testing::init_parameters(*model);
    testing::init_parameters(*reference);
    fully_shard({*model->first, *model->first->lin, *model->second}, {.layout = GetParam()});
    EXPECT_FALSE(model->first->lin->is_fully_sharded());
    fully_shard(*model, {.layout = GetParam()});
    EXPECT_TRUE(model(at::ones({2, 16})).allclose(reference(at::ones({2, 16}))));
    model->second->unshard();
    EXPECT_TRUE(model->first->lin->weight.equal(reference->first->lin->weight));
    model->first->reshard();
    EXPECT_ANY_THROW(model->second->lin->weight.sum());
  });
}

}  // namespace
}  // namespace fsdp
