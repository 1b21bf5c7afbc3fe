#include <ATen/ops/arange.h>
#include <ATen/ops/relu.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>

#include "fsdp/activation.h"
#include "fsdp/adamw.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "reference/world.h"
#include "support/layouts.h"
#include "support/models.h"
#include "support/recorder.h"

// Class Prefetch of the reference suite, continued: modules that are sharded in lists, and groups
// inside of what is recomputed.

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
        testing::note_value(loss);
        testing::note_gradients(*model);
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
        testing::note_value(loss);
        testing::note_gradients(*model);
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

// A layer that is recomputed in backward, and in it a part that is recomputed then, of which w1 is
// a group of its own.
struct FeedForwardImpl : torch::nn::Module {
  FeedForwardImpl() {
    w1 = register_module("w1", fsdp::nn::Linear(16, 64));
    w2 = register_module("w2", fsdp::nn::Linear(64, 16));
  }
  at::Tensor forward(const at::Tensor& x) { return w2(at::relu(w1(x))); }
  fsdp::nn::Linear w1{nullptr}, w2{nullptr};
};
FSDP_MODULE(FeedForward);

struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    in_proj = register_module("in_proj", fsdp::nn::Linear(16, 16));
    feed_forward = register_module("feed_forward", FeedForward());
  }
  at::Tensor forward(const at::Tensor& x) { return x + feed_forward(in_proj(x)); }
  fsdp::nn::Linear in_proj{nullptr};
  FeedForward feed_forward{nullptr};
};
FSDP_MODULE(Layer);

struct NestedDecoderImpl : torch::nn::Module {
  NestedDecoderImpl() {
    tok_embeddings = register_module("tok_embeddings", fsdp::nn::Embedding(8, 16));
    auto list = register_module("layers", torch::nn::ModuleList());
    for (int i = 0; i < 3; ++i) {
      layers.emplace_back();
      list->push_back(layers.back());
    }
    norm = register_module("norm", fsdp::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
    output = register_module("output", fsdp::nn::Linear(16, 8));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor h = tok_embeddings(tokens);
    for (Layer& layer : layers) h = layer(h);
    return output(norm(h));
  }
  fsdp::nn::Embedding tok_embeddings{nullptr};
  std::vector<Layer> layers;
  fsdp::nn::LayerNorm norm{nullptr};
  fsdp::nn::Linear output{nullptr};
};
FSDP_MODULE(NestedDecoder);

// Promise: FSDP2's order of gathers where groups lie inside of what is recomputed: by default the
// order of forward backwards; with lists as they say, and what no list names is gathered by its
// recomputation, which is a forward.
TEST_P(PrefetchLists, test_set_modules_to_backward_prefetch_inside_ac) {
  run_world(kWorldSize, [](const ProcessGroupPtr&) {
    for (const bool with_lists : {false, true}) {
      NestedDecoder model;
      testing::init_parameters(*model);
      const FullyShardOptions options = testing::shard_options(GetParam(), true);
      auto& layers = model->layers;
      for (Layer& layer : layers) {
        checkpoint(*layer->feed_forward);
        checkpoint(*layer);
        fully_shard(*layer->feed_forward->w1, options);
        fully_shard(*layer, options);
      }
      fully_shard(*model->tok_embeddings, options);
      fully_shard({*model->norm, *model->output}, options);
      fully_shard(*model, options);
      if (with_lists) {
        model->output->set_modules_to_backward_prefetch({&*layers[2]});
        for (const size_t i : {1, 2}) {
          layers[i]->set_modules_to_backward_prefetch(
              {&*layers[i - 1], &*layers[i - 1]->feed_forward->w1});
        }
        layers[0]->set_modules_to_backward_prefetch({&*model->tok_embeddings});
      }
      const auto recorder = std::make_shared<Recorder>("UR");
      set_schedule_observer(*model, recorder);
      const std::string n = "norm, output", t = "tok_embeddings";
      const auto l = [](int i) { return "layers." + std::to_string(i); };
      const auto w = [&](int i) { return l(i) + ".feed_forward.w1"; };
      std::vector<std::string> expected =
          backward({"U " + n, "U " + l(2), "R " + n, "U " + w(2), "U " + l(1), "R " + w(2),
                    "R " + l(2), "U " + w(1), "U " + l(0), "R " + w(1), "R " + l(1), "U " + w(0),
                    "U " + t, "R " + w(0), "R " + l(0), "R " + t});
      if (with_lists) {
        expected = backward({"U " + n, "U " + l(2), "R " + n, "U " + l(1), "U " + w(1), "U " + w(2),
                             "R " + w(2), "R " + l(2), "U " + l(0), "U " + w(0), "R " + w(1),
                             "R " + l(1), "U " + t, "R " + w(0), "R " + l(0), "R " + t});
        expected[5] = forward({"U " + w(2)}).front();
      }
      for (int iteration = 0; iteration < 3; ++iteration) {
        const at::Tensor tokens = (at::arange(32) % 8).view({2, 16}).to(testing::suite_device());
        const at::Tensor loss = model(tokens).sum();
        recorder->take();
        loss.backward();
        testing::note_value(loss);
        testing::note_gradients(*model);
        EXPECT_EQ(recorder->take(), expected) << "iteration " << iteration;
      }
    }
  });
}

}  // namespace
}  // namespace fsdp
