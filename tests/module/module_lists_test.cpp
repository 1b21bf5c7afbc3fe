#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "support/layouts.h"
#include "support/messages.h"
#include "support/models.h"

// fully_shard({a, b}): modules that are gathered, freed and reduced together. Their lists of events
// are in tests/reference.

namespace fsdp {
namespace {

using testing::expect_message;

class ModuleListsTest : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(ModuleListsTest);

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
    testing::Transformer model;
    testing::Transformer reference;
    testing::init_parameters(*model);
    testing::init_parameters(*reference);
    auto& blocks = model->blocks;
    fully_shard({*blocks[0], *blocks[0]->wq, *blocks[1]}, {.layout = GetParam()});
    EXPECT_FALSE(blocks[0]->wq->is_fully_sharded());
    fully_shard(*model, {.layout = GetParam()});
    const at::Tensor tokens = at::arange(16).view({2, 8}) % 8;
    EXPECT_TRUE(model(tokens).allclose(reference(tokens)));
    blocks[1]->unshard();
    EXPECT_TRUE(blocks[0]->wq->weight.equal(reference->blocks[0]->wq->weight));
    blocks[0]->reshard();
    EXPECT_ANY_THROW(blocks[1]->wq->weight.sum());
  });
}

}  // namespace
}  // namespace fsdp
