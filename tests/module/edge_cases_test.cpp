#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/optim/sgd.h>

#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "support/layouts.h"
#include "support/messages.h"
#include "support/models.h"

// What users do that is easy to get wrong in silence. Each against the same without sharding.

namespace fsdp {
namespace {

using testing::expect_message;
using testing::MLP;

// Two equal models, the second sharded.
struct Pair {
  MLP plain{5};
  MLP sharded{5};

  explicit Pair(Layout layout) {
    testing::init_parameters(*plain);
    testing::init_parameters(*sharded);
    fully_shard(*sharded, {.layout = layout});
  }
  void expect_equal_outputs(const std::string& when) {
    const c10::NoGradGuard no_grad;
    const at::Tensor x = at::ones({2, 5});
    EXPECT_TRUE(sharded(x).allclose(plain(x), 1e-5, 1e-6)) << when;
  }
  void backward() {
    plain(at::ones({2, 5})).sum().backward();
    sharded(at::ones({2, 5})).sum().backward();
  }
};

class EdgeCases : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(EdgeCases);

// Promise: weights that an optimizer changed are used, also where parameters stayed unsharded over
// its step: kept by an evaluation, by reshard_after_backward = false, or by unshard(). torch's SGD
// writes through data(), which no version counter sees.
TEST_P(EdgeCases, StepWhileUnsharded) {
  run_ranks(3, [](const ProcessGroupPtr&) {
    for (const std::string keeps : {"evaluation", "reshard_after_backward", "unshard"}) {
      for (const bool set_to_none : {true, false}) {
        Pair pair(GetParam());
        torch::optim::SGD plain_optimizer(pair.plain->parameters(), torch::optim::SGDOptions(0.1));
        torch::optim::SGD optimizer(pair.sharded->parameters(), torch::optim::SGDOptions(0.1));
        if (keeps != "evaluation") pair.sharded->set_reshard_after_backward(false);
        for (int step = 0; step < 3; ++step) {
          if (keeps == "unshard") pair.sharded->unshard();
          pair.backward();
          if (keeps == "evaluation") pair.expect_equal_outputs("before the step");
          plain_optimizer.step();
          optimizer.step();
          plain_optimizer.zero_grad(set_to_none);
          optimizer.zero_grad(set_to_none);
          pair.expect_equal_outputs(keeps);
        }
      }
    }
  });
}

// Promise: a gather that was started before weights were loaded is not used after.
TEST_P(EdgeCases, LoadWhileAGatherIsPending) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    Pair pair(GetParam());
    (void)pair.sharded->unshard_async();
    const c10::NoGradGuard no_grad;
    for (at::Tensor& param : pair.sharded->parameters()) param.mul_(2);
    for (at::Tensor& param : pair.plain->parameters()) param.mul_(2);
    pair.expect_equal_outputs("after the weights doubled");
  });
}

// Promise: freezing and unfreezing a sharded parameter counts from the next forward on, also while
// the unsharded ones are kept.
TEST_P(EdgeCases, FreezeWhileUnsharded) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    Pair pair(GetParam());
    at::Tensor bias = pair.sharded->named_parameters()["in_proj.bias"];
    bias.set_requires_grad(false);
    pair.expect_equal_outputs("evaluation keeps the root unsharded");
    bias.set_requires_grad(true);
    pair.backward();
    ASSERT_TRUE(bias.grad().defined());
    EXPECT_TRUE(full_tensor(bias.grad()).allclose(pair.plain->in_proj->bias.grad()));
    bias.mutable_grad().reset();
    pair.expect_equal_outputs("again");
    bias.set_requires_grad(false);
    pair.backward();
    EXPECT_FALSE(bias.grad().defined());
  });
}

// Promise: parameters with no elements do no harm, whichever dimension is 0.
TEST_P(EdgeCases, ParametersWithoutElements) {
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      linear = register_module("linear", torch::nn::Linear(4, 4));
      no_rows = register_parameter("no_rows", at::zeros({0, 3}));
      no_columns = register_parameter("no_columns", at::zeros({4, 0}));
    }
    at::Tensor forward(const at::Tensor& x) {
      return linear(x) + no_rows.sum() + at::matmul(no_columns, no_columns.t()).sum();
    }
    torch::nn::Linear linear{nullptr};
    at::Tensor no_rows, no_columns;
  };
  FSDP_MODULE(Net);
  for (const int world_size : {1, 3}) {
    run_ranks(world_size, [](const ProcessGroupPtr&) {
      Net model;
      fully_shard(*model, {.layout = GetParam()});
      for (int step = 0; step < 2; ++step) model(at::ones({2, 4})).sum().backward();
      EXPECT_EQ(full_tensor(model->no_rows).sizes(), at::IntArrayRef({0, 3}));
      EXPECT_TRUE(model->named_parameters()["no_columns"].grad().defined());
    });
  }
}

// Promise: containers that hand out their dictionary's entries are refused: forward would read this
// rank's part.
TEST_P(EdgeCases, ParameterContainersAreRefused) {
  struct WithListImpl : torch::nn::Module {
    WithListImpl() {
      list = register_module("list", torch::nn::ParameterList(at::ones({2}), at::ones({2})));
    }
    at::Tensor forward(const at::Tensor& x) { return x + list[0]; }
    torch::nn::ParameterList list{nullptr};
  };
  FSDP_MODULE(WithList);
  struct WithDictImpl : torch::nn::Module {
    WithDictImpl() {
      dict = register_module("dict", torch::nn::ParameterDict());
      dict->insert("scale", at::ones({2}));
    }
    at::Tensor forward(const at::Tensor& x) { return x * dict["scale"]; }
    torch::nn::ParameterDict dict{nullptr};
  };
  FSDP_MODULE(WithDict);
  run_ranks(2, [](const ProcessGroupPtr&) {
    WithList with_list;
    WithDict with_dict;
    expect_message<ConfigError>([&] { fully_shard(*with_list, {.layout = GetParam()}); },
                                "'list' is a ParameterList");
    expect_message<ConfigError>([&] { fully_shard(*with_dict, {.layout = GetParam()}); },
                                "'dict' is a ParameterList or");
  });
}

struct Opaque {
  at::Tensor value;
};

// Promise: a result of a type that hooks cannot look into still gives this step's gradients in this
// step.
TEST_P(EdgeCases, ResultOfAnUnknownType) {
  struct NetImpl : torch::nn::Module {
    NetImpl() { linear = register_module("linear", torch::nn::Linear(4, 4)); }
    Opaque forward(const at::Tensor& x) { return {linear(x)}; }
    torch::nn::Linear linear{nullptr};
  };
  FSDP_MODULE(Net);
  run_ranks(2, [](const ProcessGroupPtr&) {
    Net model;
    fully_shard(*model, {.layout = GetParam()});
    for (int step = 1; step <= 3; ++step) {
      const at::Tensor x = at::full({1, 4}, 1.0 * step).set_requires_grad(true);
      model(x).value.sum().backward();
      EXPECT_TRUE(full_tensor(model->named_parameters()["linear.weight"].grad())
                      .equal(at::full({4, 4}, 1.0 * step)));
      model->zero_grad();
    }
  });
}

// Promise: a module may call itself.
TEST_P(EdgeCases, Recursion) {
  struct NetImpl : torch::nn::Module {
    NetImpl() { linear = register_module("linear", torch::nn::Linear(4, 4)); }
    at::Tensor forward(const at::Tensor& x, int64_t depth) {
      const at::Tensor inner = depth > 0 ? (*again)(x, depth - 1) : x;
      return linear(inner);
    }
    std::function<at::Tensor(const at::Tensor&, int64_t)>* again = nullptr;
    torch::nn::Linear linear{nullptr};
  };
  FSDP_MODULE(Net);
  run_ranks(2, [](const ProcessGroupPtr&) {
    Net plain, sharded;
    std::vector<at::Tensor> outputs;
    for (Net* model : {&plain, &sharded}) {
      testing::init_parameters(**model);
      if (model == &sharded)
        fully_shard(**model, {.reshard_after_forward = true, .layout = GetParam()});
      std::function<at::Tensor(const at::Tensor&, int64_t)> again =
          [model](const at::Tensor& x, int64_t depth) { return (*model)(x, depth); };
      (*model)->again = &again;
      outputs.push_back((*model)(at::ones({1, 4}), 2));
      outputs.back().sum().backward();
    }
    EXPECT_TRUE(outputs[0].equal(outputs[1]));
    EXPECT_TRUE(full_tensor(sharded->named_parameters()["linear.weight"].grad())
                    .allclose(plain->linear->weight.grad(), 1e-5, 1e-6));
  });
}

// Promise: to(dtype) leaves sharded parameters what they are: full_tensor and clipping still see
// all ranks, before any forward. fp64 clips too.
TEST_P(EdgeCases, ConversionKeepsTheLabels) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    Pair pair(GetParam());
    pair.backward();
    for (at::Tensor& param : pair.sharded->parameters()) param.mutable_grad().reset();
    pair.sharded->to(at::kDouble);
    pair.plain->to(at::kDouble);
    const auto plain = pair.plain->named_parameters();
    for (const auto& entry : pair.sharded->named_parameters()) {
      EXPECT_TRUE(full_tensor(entry.value()).equal(plain[entry.key()])) << entry.key();
    }
    const at::Tensor x = at::ones({2, 5}, at::kDouble);
    pair.sharded(x).sum().backward();
    EXPECT_EQ(clip_grad_norm_(pair.sharded->parameters(), 1.0).scalar_type(), at::kDouble);
  });
}

// Promise: a gradient that autograd made itself, of a loss over the sharded parameters, and one
// that was reduced add up, and the sum knows that it is sharded.
TEST_P(EdgeCases, LossOverShardedParameters) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    Pair pair(GetParam());
    at::Tensor penalty = at::zeros({});
    for (const at::Tensor& param : pair.sharded->parameters())
      penalty = penalty + param.pow(2).sum();
    (pair.sharded(at::ones({2, 5})).sum() + penalty).backward();
    at::Tensor plain_penalty = at::zeros({});
    for (const at::Tensor& param : pair.plain->parameters()) {
      plain_penalty = plain_penalty + param.pow(2).sum();
    }
    (pair.plain(at::ones({2, 5})).sum() + plain_penalty).backward();
    const auto plain = pair.plain->named_parameters();
    for (const auto& entry : pair.sharded->named_parameters()) {
      EXPECT_TRUE(full_tensor(entry.value().grad()).allclose(plain[entry.key()].grad(), 1e-5, 1e-6))
          << entry.key();
    }
  });
}

// Promise: HSDP microbatches that use different parameters add up, each to its own.
TEST_P(EdgeCases, PartialReductionsOfDifferentParameters) {
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      a = register_module("a", torch::nn::Linear(4, 6));
      b = register_module("b", torch::nn::Linear(4, 3));
    }
    at::Tensor forward(const at::Tensor& x, int64_t which) { return which == 0 ? a(x) : b(x); }
    torch::nn::Linear a{nullptr}, b{nullptr};
  };
  FSDP_MODULE(Net);
  run_ranks(4, [](const ProcessGroupPtr&) {
    Net plain, sharded;
    testing::init_parameters(*plain);
    testing::init_parameters(*sharded);
    fully_shard(*sharded,
                {.mesh = init_device_mesh(c10::DeviceType::CPU, {2, 2}, {"replicate", "shard"}),
                 .layout = GetParam()});
    for (int64_t which = 0; which < 2; ++which) {
      sharded->set_requires_all_reduce(which == 1);
      sharded->set_is_last_backward(which == 1);
      const at::Tensor x = at::full({1, 4}, which + 1.0);
      plain(x, which).sum().backward();
      sharded(x, which).sum().backward();
    }
    const auto expected = plain->named_parameters();
    for (const auto& entry : sharded->named_parameters()) {
      ASSERT_TRUE(entry.value().grad().defined()) << entry.key();
      EXPECT_TRUE(full_tensor(entry.value().grad()).allclose(expected[entry.key()].grad()))
          << entry.key();
    }
  });
}

// Promise: a module that returns its parameter, or passes a leaf through, leaves no hook on it.
TEST_P(EdgeCases, NoHooksOnLeaves) {
  struct ReturnsImpl : torch::nn::Module {
    ReturnsImpl() { weight = register_parameter("weight", at::ones({3})); }
    std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {x * weight, weight}; }
    at::Tensor weight;
  };
  FSDP_MODULE(Returns);
  run_ranks(2, [](const ProcessGroupPtr&) {
    std::weak_ptr<ForwardHooks> state;
    {
      Returns model;
      state =
          std::weak_ptr<ForwardHooks>(fully_shard(*model, {.layout = GetParam()}).forward_hooks());
      for (int step = 0; step < 3; ++step) model(at::ones({3})).first.sum().backward();
    }
    EXPECT_TRUE(state.expired()) << "something still owns the state of a module that is gone";
  });
}

}  // namespace
}  // namespace fsdp
