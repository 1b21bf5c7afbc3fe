#include <ATen/ops/abs.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/real.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "fsdp/adamw.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "support/layouts.h"
#include "support/messages.h"
#include "support/models.h"

// Gradients that come in an odd form, at an odd time, or of odd parameters.

namespace fsdp {
namespace {

using testing::expect_message;

class OddGradientsTest : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(OddGradientsTest);

template <class Model>
void expect_equal_grads(Model& model, Model& reference) {
  const auto expected = reference->named_parameters();
  for (const auto& entry : model->named_parameters()) {
    const at::Tensor grad = expected[entry.key()].grad();
    ASSERT_EQ(entry.value().grad().defined(), grad.defined()) << entry.key();
    if (!grad.defined()) continue;
    EXPECT_TRUE(full_tensor(entry.value().grad()).allclose(grad, 1e-5, 1e-6)) << entry.key();
  }
}

struct ComplexImpl : torch::nn::Module {
  ComplexImpl() {
    const at::Tensor real = at::arange(12, at::kFloat).view({4, 3}) - 5;
    weight = register_parameter("weight", at::complex(real, real.flip(0)));
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::matmul(x.to(at::kComplexFloat), weight.transpose(0, 1).conj()).abs() +
           at::real(weight.conj() * x.select(1, 0).sum()).sum();
  }
  at::Tensor weight;
};
FSDP_MODULE(Complex);

// Promise: a gradient that is a lazily conjugated view is copied by value.
TEST_P(OddGradientsTest, LazilyConjugated) {
  for (const int world_size : {1, 3}) {
    run_ranks(world_size, [](const ProcessGroupPtr&) {
      Complex model;
      Complex reference;
      fully_shard(*model, {.layout = GetParam()});
      model(at::ones({2, 3})).sum().backward();
      reference(at::ones({2, 3})).sum().backward();
      expect_equal_grads(model, reference);
    });
  }
}

// Its parent uses its weight directly, besides calling it.
struct RegularizedImpl : torch::nn::Module {
  RegularizedImpl() { linear = register_module("linear", fsdp::nn::Linear(3, 3)); }
  at::Tensor forward(const at::Tensor& x) {
    if (linear->is_fully_sharded()) linear->unshard();
    const at::Tensor norm = linear->weight.sum();
    return linear(x * 1.0).sum() + norm;
  }
  fsdp::nn::Linear linear{nullptr};
};
FSDP_MODULE(Regularized);

// Promise: a gradient that comes after the group's own post-backward is reduced in the same step.
TEST_P(OddGradientsTest, AfterPostBackward) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    Regularized model;
    Regularized reference;
    testing::init_parameters(*model);
    testing::init_parameters(*reference);
    fully_shard(*model->linear, {.reshard_after_forward = false, .layout = GetParam()});
    fully_shard(*model, {.layout = GetParam()});
    for (int step = 0; step < 2; ++step) {
      const at::Tensor x = at::ones({2, 3}).set_requires_grad(true);
      model(x).backward();
      reference(x).backward();
      expect_equal_grads(model, reference);
    }
  });
}

// Promise: parameters that were unsharded by hand can be used outside of forward, before and after
// training steps; their gradient comes with the next one.
TEST_P(OddGradientsTest, OutsideOfForward) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    testing::MLP model(3);
    testing::MLP reference(3);
    testing::init_parameters(*model);
    testing::init_parameters(*reference);
    FSDPModule& root = fully_shard(*model, {.layout = GetParam()});
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      reference->zero_grad();
      root.unshard();
      model->in_proj->weight.square().sum().backward();
      root.reshard();
      reference->in_proj->weight.square().sum().backward();
      model(at::ones({2, 3})).sum().backward();
      reference(at::ones({2, 3})).sum().backward();
      expect_equal_grads(model, reference);
    }
  });
}

// Promise: after a step that threw, in forward or in backward, a model that is one group trains on,
// though no input requires grad and nothing else would end the step.
TEST_P(OddGradientsTest, AfterAStepThatThrew) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [](const ProcessGroupPtr&) {
      for (const bool in_forward : {true, false}) {
        testing::MLP model(3);
        testing::MLP reference(3);
        testing::init_parameters(*model);
        testing::init_parameters(*reference);
        fully_shard(*model, {.layout = GetParam()});
        for (int round = 0; round < 2; ++round) {
          if (in_forward) {
            EXPECT_ANY_THROW(model(at::ones({2, 7})));
          } else {
            const at::Tensor y = model(at::ones({2, 3}));
            y.register_hook([](const at::Tensor& grad) -> at::Tensor {
              throw std::runtime_error("in backward");
              return grad;
            });
            EXPECT_ANY_THROW(y.sum().backward());
          }
          model->zero_grad();
          reference->zero_grad();
          model(at::ones({2, 3})).sum().backward();
          reference(at::ones({2, 3})).sum().backward();
          expect_equal_grads(model, reference);
        }
      }
    });
  }
}

struct OddlyTypedImpl : torch::nn::Module {
  OddlyTypedImpl() {
    weight = register_parameter("weight", at::ones({4, 3}));
    empty = register_parameter("empty", at::zeros({0, 3}));
    mask = register_parameter("mask", at::ones({5}, at::kBool), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::matmul(x, weight.t()).sum() + empty.sum() + mask.to(at::kFloat).sum();
  }
  at::Tensor weight, empty, mask;
};
FSDP_MODULE(OddlyTyped);

// Promise: empty parameters beside an odd number of bytes gather.
TEST_P(OddGradientsTest, OfEmptyParametersBesideBools) {
  for (const int world_size : {1, 2, 7}) {
    run_ranks(world_size, [](const ProcessGroupPtr&) {
      OddlyTyped model;
      OddlyTyped reference;
      fully_shard(*model, {.layout = GetParam()});
      EXPECT_EQ(model(at::ones({2, 3})).item<float>(), reference(at::ones({2, 3})).item<float>());
      model(at::ones({2, 3})).backward();
      reference(at::ones({2, 3})).backward();
      expect_equal_grads(model, reference);
    });
  }
}

// Promise: a step moves the version counters of all shards, empty ones too, so that ranks agree on
// whether parameters that stayed unsharded are old.
TEST_P(OddGradientsTest, StepsOfEmptyShards) {
  run_ranks(4, [](const ProcessGroupPtr&) {
    struct SmallImpl : torch::nn::Module {
      SmallImpl() { weight = register_parameter("weight", at::ones({3})); }
      at::Tensor forward(const at::Tensor& x) { return (x * weight).sum(); }
      at::Tensor weight;
    };
    FSDP_MODULE(Small);
    Small model;
    Small reference;
    fully_shard(*model, {.layout = GetParam()});
    AdamW optimizer(parameters(*model), AdamWOptions(0.1));
    AdamW reference_optimizer(reference->parameters(), AdamWOptions(0.1));
    at::Tensor y = model(at::ones({3}));
    at::Tensor expected = reference(at::ones({3}));
    for (int step = 0; step < 3; ++step) {
      y.backward();
      expected.backward();
      y = model(at::ones({3}));  // before the step: these parameters are old afterwards
      optimizer.step();
      reference_optimizer.step();
      const c10::NoGradGuard no_grad;
      EXPECT_NEAR(model(at::ones({3})).item<float>(), reference(at::ones({3})).item<float>(), 1e-5);
      const c10::AutoGradMode grad(/*enabled=*/true);
      y = model(at::ones({3}));
      expected = reference(at::ones({3}));
    }
  });
}

struct Ignore : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor&) override {}
};

// Promise: a hook on a parameter's gradients that sharding would silence is refused.
TEST_P(OddGradientsTest, WithAHookOfTheirOwn) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    testing::MLP model(3);
    torch::autograd::impl::set_post_acc_grad_hooks(model->in_proj->weight,
                                                   std::make_unique<Ignore>());
    expect_message<ConfigError>([&] { fully_shard(*model, {.layout = GetParam()}); },
                                "'in_proj.weight' of shape [12, 3] has a post-accumulate-gradient");
    EXPECT_FALSE(model->is_fully_sharded());
  });
}

}  // namespace
}  // namespace fsdp
