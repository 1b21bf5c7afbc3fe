#include <sstream>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "fsdp/adamw.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "support/layouts.h"
#include "support/messages.h"
#include "support/models.h"

// Mistakes that would otherwise train wrong, or nothing, without a word. Each is told, and the
// message says what to do. Direct uses of a sharded weight: access_test.

namespace fsdp {
namespace {

using testing::expect_message;
using testing::MLP;

class MisuseTest : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(MisuseTest);

// Promise: an optimizer that was built before sharding, and whoever else reads the unsharded
// parameters' gradients, is told; it would find none, and skip every parameter.
TEST_P(MisuseTest, OptimizerBuiltBeforeSharding) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    const auto check = [&](const auto& make_optimizer) {
      MLP model(4);
      const std::vector<at::Tensor> params = model->parameters();
      auto optimizer = make_optimizer(params);
      fully_shard(*model, {.layout = GetParam()});
      for (int step = 0; step < 2; ++step) {
        model(at::ones({2, 4})).sum().backward();
        expect_message<c10::Error>([&] { optimizer.step(); }, "from fsdp::parameters(model)");
        expect_message<c10::Error>([&] { torch::nn::utils::clip_grad_norm_(params, 1.0); },
                                   "'in_proj.weight' of shape [16, 4] is at the sharded parameter");
        optimizer.zero_grad();  // may be called at any time, and helps nothing
      }
      // The one built afterwards works, also beside it.
      AdamW right(parameters(*model), AdamWOptions(0.1));
      const at::Tensor before = full_tensor(parameters(*model)[0]).detach().clone();
      model(at::ones({2, 4})).sum().backward();
      right.step();
      EXPECT_FALSE(full_tensor(parameters(*model)[0]).equal(before));
    };
    check([](const auto& p) { return torch::optim::SGD(p, torch::optim::SGDOptions(0.1)); });
    check([](const auto& p) { return torch::optim::AdamW(p, torch::optim::AdamWOptions(0.1)); });
    check([](const auto& p) { return torch::optim::Adam(p, torch::optim::AdamOptions(0.1)); });
    check(
        [](const auto& p) { return torch::optim::RMSprop(p, torch::optim::RMSpropOptions(0.1)); });

    MLP model(4);
    AdamW ours(model->parameters(), AdamWOptions(0.1));
    fully_shard(*model, {.layout = GetParam()});
    model(at::ones({2, 4})).sum().backward();
    expect_message<StateError>([&] { ours.step(); }, "Build the optimizer after fully_shard()");
  });
}

// Promise: a write to an unsharded weight, which the reshard would lose, is told by the reshard, in
// whatever way it was done and whoever reshards; the weights stay what they were.
TEST_P(MisuseTest, WriteToAnUnshardedWeight) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    const c10::NoGradGuard no_grad;
    const std::function<void(at::Tensor&)> writes[] = {
        [](at::Tensor& weight) { weight.mul_(2); },
        [](at::Tensor& weight) {
          weight.copy_(at::ones({16, 4}));
        },
        [](at::Tensor& weight) { weight.detach()[0].fill_(3); },
        [](at::Tensor& weight) {
          weight.set_data(at::ones({16, 4}));
        },
    };
    for (const auto& write : writes) {
      MLP model(4);
      MLP reference(4);
      testing::init_parameters(*model);
      testing::init_parameters(*reference);
      fully_shard(*model, {.reshard_after_forward = true, .layout = GetParam()});
      model->unshard();
      write(model->in_proj->weight);
      expect_message<StateError>([&] { model->reshard(); },
                                 "'in_proj.weight' of shape [16, 4] was");
      model->reshard();  // told once
      EXPECT_TRUE(model(at::ones({2, 4})).equal(reference(at::ones({2, 4}))));

      model->unshard();
      write(model->in_proj->weight);
      expect_message<StateError>(
          [&] {
            model(at::ones({2, 4}));
          },
          "copy_(distribute_tensor(whole, sharded_parameter))");
      EXPECT_TRUE(model(at::ones({2, 4})).equal(reference(at::ones({2, 4}))));
    }
    // What the message says to do.
    MLP model(4);
    fully_shard(*model, {.layout = GetParam()});
    for (at::Tensor& param : parameters(*model)) {
      param.copy_(distribute_tensor(at::ones(spec_of(param)->sizes), param));
      EXPECT_TRUE(full_tensor(param).equal(at::ones(spec_of(param)->sizes)));
    }
  });
}

// Promise: a weight that was given another shape or other data while it was sharded is told by the
// next gather, before anything computes with it, and is then what it was.
TEST_P(MisuseTest, ReshapedWhileSharded) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    const std::function<void(at::Tensor&)> edits[] = {
        [](at::Tensor& weight) { weight.t_(); },
        [](at::Tensor& weight) { weight.unsqueeze_(0); },
        [](at::Tensor& weight) {
          weight.as_strided_({4, 4}, {1, 4});
        },
        [](at::Tensor& weight) {
          weight.set_data(at::ones({4, 4}));
        },
    };
    for (const auto& edit : edits) {
      MLP model(4, /*dim_multiplier=*/1);
      MLP reference(4, 1);
      testing::init_parameters(*model);
      testing::init_parameters(*reference);
      fully_shard(*model, {.reshard_after_forward = false, .layout = GetParam()});
      {
        const c10::NoGradGuard no_grad;
        edit(model->in_proj->weight);
      }
      expect_message<StateError>(
          [&] {
            model(at::ones({2, 4}));
          },
          "'in_proj.weight' of shape [4, 4] was given another shape");
      EXPECT_TRUE(model(at::ones({2, 4})).equal(reference(at::ones({2, 4}))));
    }
  });
}

// Promise: ranks whose models differ are told at the first forward, with what differs: the ranks
// that come later say so, and the others are freed.
TEST_P(MisuseTest, DifferentModelsOnRanks) {
  struct Case {
    std::function<void(MLP&, FullyShardOptions&)> differ;
    std::string part;
  };
  const Layout other_layout = GetParam() == Layout::kFlat ? Layout::kPerParameter : Layout::kFlat;
  const Case cases[] = {
      {[](MLP& model, FullyShardOptions&) { model = MLP(5); }, "'in_proj.weight' [20, 5] Float"},
      {[](MLP& model, FullyShardOptions&) { model->to(at::kDouble); }, "[16, 4] Double"},
      {[](MLP& model, FullyShardOptions&) { model->in_proj->bias.set_requires_grad(false); },
       "'in_proj.bias' [16] Float frozen"},
      {[&](MLP&, FullyShardOptions& options) { options.layout = other_layout; },
       other_layout == Layout::kFlat ? "flat dim 0" : "per parameter dim 0"},
      {[](MLP&, FullyShardOptions& options) { options.mp_policy.param_dtype = at::kBFloat16; },
       "param_dtype BFloat16"},
      {[](MLP& model, FullyShardOptions& options) {
         options.ignored_params = {model->out_proj->bias};
       },
       "no more parameters"},
  };
  for (const Case& entry : cases) {
    std::atomic<int> num_told{0};
    expect_message<StateError>(
        [&] {
          run_ranks(3, [&](const ProcessGroupPtr& group) {
            MLP model(4);
            FullyShardOptions options{.layout = GetParam()};
            if (group->getRank() == 1) entry.differ(model, options);
            fully_shard(*model, options);
            try {
              model(at::ones({2, model->in_proj->options.in_features()},
                             model->in_proj->weight.scalar_type()));
            } catch (const StateError& error) {
              const std::string message = error.what_without_backtrace();
              EXPECT_NE(message.find("has another model than rank"), std::string::npos) << message;
              EXPECT_NE(message.find(entry.part), std::string::npos) << message;
              ++num_told;
              throw;
            }
          });
        },
        "Every rank must build the same model and shard it with the same options");
    EXPECT_GE(num_told, 1) << entry.part;
  }
}

// Promise: the same model, lazily initialized anew, is the same; several models in one job too.
TEST_P(MisuseTest, EqualModelsAreEqual) {
  run_ranks(4, [](const ProcessGroupPtr&) {
    for (int i = 0; i < 3; ++i) {
      MLP model(4 + i);
      FullyShardOptions options{.layout = GetParam()};
      if (i == 1) options.mesh = init_device_mesh(c10::kCPU, {2, 2}, {"replicate", "shard"});
      fully_shard(*model, options);
      model(at::ones({2, 4 + i})).sum().backward();
    }
  });
}

// Promise: what would silently work with this rank's part alone is refused.
TEST_P(MisuseTest, SaveAndCloneOfASharded) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    MLP model(4);
    fully_shard(*model->in_proj, {.layout = GetParam()});
    std::ostringstream stream;
    expect_message<StateError>([&] { torch::save(model, stream); },
                               "torch::save: torch::nn::LinearImpl is sharded");
    fully_shard(*model, {.layout = GetParam()});
    expect_message<StateError>([&] { torch::save(model, stream); }, "full_tensor()");
    expect_message<StateError>([&] { (void)model->clone(); }, "is sharded");
    torch::save(parameters(*model), stream);  // this rank's parts, as such
  });
}

struct ReferenceMemberImpl : torch::nn::Module {
  ReferenceMemberImpl() : weight(register_parameter("weight", at::ones({4, 4}))) {}
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, weight); }
  at::Tensor& weight;
};
FSDP_MODULE(ReferenceMember);

struct ByNameImpl : torch::nn::Module {
  ByNameImpl() { register_parameter("weight", at::ones({4, 4})); }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, named_parameters()["weight"]); }
};
FSDP_MODULE(ByName);

// Promise: parameters that forward reaches through the dictionary, where the shard stands, are
// refused before anything changes, but may be ignored.
TEST_P(MisuseTest, ParametersThatNoMemberHolds) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    ReferenceMember by_reference;
    expect_message<ConfigError>([&] { fully_shard(*by_reference, {.layout = GetParam()}); },
                                "'weight' of shape [4, 4] is held by no member");
    EXPECT_FALSE(by_reference->is_fully_sharded());
    ByName by_name;
    expect_message<ConfigError>([&] { fully_shard(*by_name, {.layout = GetParam()}); },
                                "Hold it as a member of type Tensor");
    fully_shard(*by_name, {.ignored_params = by_name->parameters(), .layout = GetParam()});
    EXPECT_EQ(by_name(at::ones({1, 4})).sum().item<float>(), 16);
  });
}

// Promise: parameters and devices that cannot meet are refused, and nothing has changed.
TEST_P(MisuseTest, OtherDevices) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    MLP model(4);
    FullyShardOptions options{.layout = GetParam()};
    for (const c10::DeviceType type : {c10::kCUDA, c10::kPrivateUse1, c10::kMeta}) {
      if (type != c10::kMeta && c10::impl::hasDeviceGuardImpl(type)) continue;
      options.mesh = std::make_shared<const DeviceMesh>(
          type, std::vector<int64_t>{2}, std::vector<std::string>{}, default_process_group());
      expect_message<ConfigError>([&] { fully_shard(*model, options); },
                                  "on which this build of libtorch does not compute");
    }
    EXPECT_FALSE(model->is_fully_sharded());
    EXPECT_EQ(spec_of(model->parameters()[0]), nullptr);
    fully_shard(*model, {.layout = GetParam()});
    EXPECT_ANY_THROW(model->to(at::kMeta));  // torch's own refusal: set_data to another type
    EXPECT_EQ(model(at::ones({2, 4})).size(1), 4);
  });
}

// Promise: converting a part of what lies in one buffer is told, where converting all of it works.
TEST(Misuse, ConvertingAPartOfAFlatBuffer) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    MLP model(4);
    fully_shard(*model);
    model->in_proj->to(at::kDouble);
    expect_message<StateError>(
        [&] {
          model(at::ones({2, 4}));
        },
        "lie in one buffer, but one was converted to Double");
    model->to(at::kDouble);
    EXPECT_EQ(model(at::ones({2, 4}, at::kDouble)).scalar_type(), at::kDouble);
  });
}

}  // namespace
}  // namespace fsdp
