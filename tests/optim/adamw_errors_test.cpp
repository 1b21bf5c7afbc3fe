#include <cmath>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "fsdp/adamw.h"
#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "support/messages.h"
#include "support/models.h"

namespace fsdp {
namespace {

using testing::expect_message;
using torch::optim::OptimizerParamGroup;
using Params = std::vector<at::Tensor>;

// Promise: options out of range are refused, and the message says which, whose and what is right.
TEST(AdamWErrors, RefusesOptions) {
  const auto make = [](const AdamWOptions& options) {
    return [options] { AdamW({at::zeros({2})}, options); };
  };
  expect_message<ConfigError>(make(-1.0), "AdamW: lr of the defaults must be at least 0, is -1.");
  expect_message<ConfigError>(make(std::nan("")), "lr of the defaults must be at least 0, is nan.");
  expect_message<ConfigError>(make(AdamWOptions().eps(-2)), "eps of the defaults must be at least");
  expect_message<ConfigError>(make(AdamWOptions().weight_decay(-3)),
                              "weight_decay of the defaults must be at least 0, is -3.");
  expect_message<ConfigError>(
      make(AdamWOptions().betas({0.5, 1})),
      "betas of the defaults must be at least 0 and less than 1, are 0.5 and 1.");
  expect_message<ConfigError>(make(AdamWOptions().betas({-0.5, 0.5})), "are -0.5 and 0.5.");
  const auto group_of = [](std::unique_ptr<torch::optim::OptimizerOptions> options) {
    return std::vector<OptimizerParamGroup>{{{at::zeros({2})}, std::move(options)}};
  };
  expect_message<ConfigError>([&] { AdamW(group_of(std::make_unique<AdamWOptions>(-1.0))); },
                              "AdamW: lr of group 0 must be at least 0, is -1.");
  expect_message<ConfigError>(
      [&] { AdamW(group_of(std::make_unique<torch::optim::AdamWOptions>())); },
      "AdamW: the options of group 0 are those of another optimizer. Pass fsdp::AdamWOptions.");
}

// Promise: parameters that cannot be stepped are refused, and the message names them.
TEST(AdamWErrors, RefusesParameters) {
  const auto make = [](Params params) { return [params] { AdamW{params}; }; };
  const at::Tensor param = at::zeros({2, 3}).set_requires_grad(true);
  expect_message<ConfigError>(make({}),
                              "AdamW: the list of parameters is empty. Pass "
                              "fsdp::parameters(model).");
  expect_message<ConfigError>(make({param, param}),
                              "AdamW: parameter 1 of group 0, of shape [2, 3], is listed twice.");
  expect_message<ConfigError>(
      [&] {
        AdamW(std::vector<OptimizerParamGroup>{{{param}}, {{param}}});
      },
      "AdamW: parameter 0 of group 1, of shape [2, 3], is listed twice.");
  expect_message<ConfigError>(make({param * 2}), "of shape [2, 3], is not a leaf: it was computed");
  expect_message<ConfigError>(make({at::zeros({2}, at::kLong)}),
                              "of shape [2], is of Long, expected a floating-point type.");
  expect_message<ConfigError>(make({at::zeros({4, 4}).narrow(1, 0, 2)}),
                              "of shape [4, 2], has strides [4, 1], which leave holes or overlap.");
}

// Promise: step() refuses what does not match, before anything changes.
TEST(AdamWErrors, RefusesGradientsAndStates) {
  at::Tensor first = at::ones({2}).set_requires_grad(true);
  at::Tensor param = at::ones({2, 3}).set_requires_grad(true);
  AdamW optimizer({first, param});
  const auto num_steps = [&](const at::Tensor& of) {
    const auto& state = *optimizer.state().at(of.unsafeGetTensorImpl());
    return static_cast<const AdamWParamState&>(state).step.item<float>();
  };
  first.mutable_grad() = at::ones({2});
  param.mutable_grad() = at::ones({2, 3}).to_sparse();
  expect_message<ConfigError>([&] { optimizer.step(); },
                              "AdamW: parameter 1 of group 0, of shape [2, 3], has a gradient of "
                              "layout Sparse, and only dense ones are supported.");
  param.mutable_grad() = at::Tensor();
  param.mutable_grad() = at::ones({2, 3});
  optimizer.step();
  EXPECT_EQ(num_steps(first), 1);

  const at::Tensor values = param.detach().clone();
  param.set_data(at::ones({4}));  // the gradient stays
  expect_message<StateError>([&] { optimizer.step(); },
                             "parameter 1 of group 0, of shape [4], is of Float on cpu, but its "
                             "gradient is of shape [2, 3], of Float on cpu.");
  param.mutable_grad() = at::ones({4});
  expect_message<StateError>([&] { optimizer.step(); },
                             "of shape [4], is of Float on cpu, but its state is of shape [2, 3], "
                             "of Float on cpu. It was converted or replaced");
  EXPECT_EQ(num_steps(first), 1);
}

// Promise: an optimizer that holds the tensors of before fully_shard(), or the module's members
// after it, says so instead of training nothing.
TEST(AdamWErrors, RefusesUnshardedParameters) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    testing::MLP model(3);
    testing::init_parameters(*model);
    AdamW too_early(parameters(*model));
    fully_shard(*model);
    const std::string message =
        "AdamW: parameter 0 of group 0, of shape [12, 3], is the unsharded parameter of a sharded "
        "module, which never has a gradient, so this optimizer would train nothing. Build the "
        "optimizer after fully_shard(), from fsdp::parameters(model).";
    model(at::ones({2, 3})).sum().backward();
    expect_message<StateError>([&] { too_early.step(); }, message);
    expect_message<StateError>([&] { AdamW{Params{model->in_proj->weight}}; }, message);
    AdamW(parameters(*model)).step();
  });
}

}  // namespace
}  // namespace fsdp
