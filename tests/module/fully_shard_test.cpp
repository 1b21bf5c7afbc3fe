#include "fsdp/fully_shard.h"

#include <sstream>

#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>

#include "fsdp/sharded_tensor.h"
#include "support/layouts.h"
#include "support/messages.h"
#include "support/models.h"

namespace fsdp {
namespace {

using testing::expect_message;
using testing::MLP;
using testing::Transformer;

struct TwoLinearsImpl : torch::nn::Module {
  TwoLinearsImpl() {
    first = register_module("first", fsdp::nn::Linear(4, 4));
    second = register_module("second", fsdp::nn::Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  fsdp::nn::Linear first{nullptr};
  fsdp::nn::Linear second{nullptr};
};
FSDP_MODULE(TwoLinears);

class FullyShard : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(FullyShard);

// Promise: parameters() gives this rank's rows, which of all ranks together are the whole tensor;
// the members' tensors come back whole, bit for bit, with unshard(), and go with reshard(); for
// worlds larger than the rows too.
TEST_P(FullyShard, ShardsAndUnshards) {
  for (const int world_size : {1, 2, 3, 8}) {
    MLP reference(5);
    testing::init_parameters(*reference);
    const auto whole = reference->named_parameters();
    std::vector<std::vector<at::Tensor>> parts(whole.size(), std::vector<at::Tensor>(world_size));
    run_ranks(world_size, [&](const ProcessGroupPtr& group) {
      const int rank = group->getRank();
      MLP model(5);
      testing::copy_parameters(*reference, *model);
      FSDPModule& fsdp_module = fully_shard(*model, {.layout = GetParam()});
      size_t index = 0;
      for (const auto& entry : model->named_parameters()) {
        const at::Tensor source = whole[entry.key()];
        parts[index++][rank] = entry.value().detach().clone();
        EXPECT_TRUE(entry.value().equal(distribute_tensor(source, entry.value())));
        if (GetParam() ==
            Layout::kPerParameter) {  // each parameter is cut on its own, as FSDP2 does
          const std::vector<at::Tensor> chunks = source.chunk(world_size);
          EXPECT_TRUE(rank < static_cast<int>(chunks.size()) ? entry.value().equal(chunks[rank])
                                                             : entry.value().numel() == 0);
        }
        EXPECT_TRUE(full_tensor(entry.value()).equal(source));
        EXPECT_TRUE(entry.value().requires_grad() && entry.value().is_leaf());
      }
      for (int time = 0; time < 2; ++time) {
        fsdp_module.unshard();
        EXPECT_TRUE(model->in_proj->weight.equal(reference->in_proj->weight));
        for (const auto& [name, param] : fsdp_module.unsharded_parameters()) {
          EXPECT_TRUE(param.equal(whole[name])) << name;
        }
        fsdp_module.reshard();
        EXPECT_THROW(model->in_proj->weight.sum(), c10::Error);
      }
      UnshardHandle handle = fsdp_module.unshard_async();
      handle.wait();
      handle.wait();  // twice is fine
      EXPECT_TRUE(model->out_proj->bias.equal(reference->out_proj->bias));
    });
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_TRUE(at::cat(parts[i]).equal(whole[i].value())) << whole[i].key();
    }
  }
}

// Promise: a module all of whose parameters are its children's has nothing to gather, and says so.
TEST_P(FullyShard, UnshardOfAModuleWithoutParameters) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    TwoLinears model;
    fully_shard(*model->first, {.layout = GetParam()});
    fully_shard(*model->second, {.layout = GetParam()});
    FSDPModule& root = fully_shard(*model, {.layout = GetParam()});
    root.unshard_async().wait();
    root.unshard();
    root.reshard();
    EXPECT_TRUE(root.unsharded_parameters().empty());
    model(at::randn({2, 4})).sum().backward();
    EXPECT_EQ(full_tensor(model->first->parameters()[0].grad()).sizes(), at::IntArrayRef({4, 4}));
  });
}

// Promise: an unsharded weight that is used while sharded throws our text: it names the parameter
// and says what to do. So does a call that goes round the hooks, through the plain class.
TEST_P(FullyShard, UseWhileShardedThrows) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    TwoLinears model;
    fully_shard(*model, {.layout = GetParam()});
    model(at::zeros({1, 4}));  // names are known from the root's first forward on
    model->reshard();
    // Flat, all parameters share one storage, which cannot tell which of them was used.
    const std::string named =
        GetParam() == Layout::kPerParameter
            ? "parameter 'first.weight' of shape [4, 4] is sharded"
            : "a parameter of a group that is sharded together ('first.weight' of shape [4, 4], "
              "'first.bias' of shape [4], 'second.weight' of shape [4, 4], 'second.bias' of shape "
              "[4]) is sharded";
    expect_message<c10::Error>([&] { model->first->weight.sum().item<float>(); }, named);
    expect_message<c10::Error>([&] { at::matmul(at::zeros({1, 4}), model->first->weight); }, named);
    expect_message<c10::Error>([&] { model->first->weight.clone(); }, "call unshard()");
    TwoLinearsImpl* plain = &*model;
    expect_message<c10::Error>([&] { plain->forward(at::zeros({1, 4})); }, "is sharded");
    torch::nn::LinearImpl* linear = &*model->first;
    expect_message<c10::Error>([&] { linear->forward(at::zeros({1, 4})); }, "is sharded");
  });
}

// Promise: what cannot be done is refused before anything changes.
TEST_P(FullyShard, RefusesBadInput) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    torch::nn::Linear plain(4, 4);
    expect_message<ConfigError>([&] { fully_shard(*plain, {.layout = GetParam()}); },
                                "runs no hooks around forward");
    torch::nn::ModuleList list(MLP(4));
    expect_message<ConfigError>([&] { fully_shard(*list, {.layout = GetParam()}); }, "ModuleList");

    TwoLinears model;
    FullyShardOptions options{.layout = GetParam()};
    options.reshard_after_forward = int64_t{3};
    expect_message<ConfigError>([&] { fully_shard(*model, options); },
                                "3 must be a factor of the shard mesh size 2");
    options.reshard_after_forward = int64_t{0};
    expect_message<ConfigError>([&] { fully_shard(*model, options); }, "must be a factor");
    options = {.layout = GetParam()};
    options.shard_placement_fn = [](const std::string&, const at::Tensor&) {
      return Shard{.dim = 1};
    };
    expect_message<ConfigError>([&] { fully_shard(*model, options); },
                                "cannot shard 'first.bias' of shape [4] on dim 1");
    options = {.layout = GetParam()};
    options.mesh =
        std::make_shared<const DeviceMesh>(c10::DeviceType::CPU, std::vector<int64_t>{1, 2, 1},
                                           std::vector<std::string>{"a", "b", "c"}, group);
    expect_message<ConfigError>([&] { fully_shard(*model, options); },
                                "expects a 1-D mesh (shard) or a 2-D mesh");

    model->first->weight.set_data(at::zeros({4, 8}).narrow(1, 0, 4));
    expect_message<ConfigError>([&] { fully_shard(*model, {.layout = GetParam()}); },
                                "'first.weight' of shape [4, 4] with strides [8, 1] is not contig");
    model->first->weight.set_data(at::zeros({}));
    expect_message<ConfigError>([&] { fully_shard(*model, {.layout = GetParam()}); },
                                "a scalar has no rows");
    EXPECT_FALSE(model->is_fully_sharded());
    for (const at::Tensor& param : model->parameters()) EXPECT_EQ(spec_of(param), nullptr);

    model->first->weight.set_data(at::zeros({4, 4}));
    fully_shard(*model, {.layout = GetParam()});
    expect_message<ConfigError>([&] { fully_shard(*model, {.layout = GetParam()}); },
                                "sharded only once");
    expect_message<ConfigError>([&] { fully_shard(*model->first, {.layout = GetParam()}); },
                                "children first, their parent after them");
    MLP unsharded(4);
    expect_message<StateError>([&] { unsharded->unshard(); }, "was never sharded");
    expect_message<StateError>([&] { unsharded->set_is_last_backward(true); },
                               "fully_shard() on it");
    expect_message<StateError>([&] { model->set_modules_to_forward_prefetch({&*unsharded}); },
                               "was never sharded");
    expect_message<ConfigError>([&] { model->set_modules_to_backward_prefetch({nullptr}); },
                                "null");
    expect_message<ConfigError>([&] { model->set_gradient_divide_factor(0); }, "must be positive");
    expect_message<StateError>([&] { model->clone(); }, "is sharded");
  });
}

// Promise: a part that ran as a root of its own cannot become part of another root unnoticed.
TEST_P(FullyShard, PartRunBeforeTheRoot) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    TwoLinears model;
    fully_shard(*model->first, {.layout = GetParam()});
    fully_shard(*model, {.layout = GetParam()});
    model->first(at::zeros({1, 4}));
    expect_message<StateError>(
        [&] {
          model(at::zeros({1, 4}));
        },
        "module 'first' has been lazily initialized");
  });
}

// Promise: ignored parameters stay whole, are not reduced, and train as plain ones.
TEST_P(FullyShard, IgnoredParameters) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    TwoLinears model;
    const at::Tensor ignored = model->second->bias;
    fully_shard(*model, {.ignored_params = {ignored}, .layout = GetParam()});
    EXPECT_TRUE(model->named_parameters()["second.bias"].is_same(ignored));
    const at::Tensor x = at::randn({2, 4}) + group->getRank();
    model(x).sum().backward();
    EXPECT_TRUE(ignored.grad().equal(at::full({4}, 2.0)));
    EXPECT_NE(spec_of(model->named_parameters()["first.bias"].grad()), nullptr);
  });
}

// Promise: a shared parameter is one sharded parameter under both names; tie() makes it so where
// assigning the member would not. Sharing across two calls is refused.
TEST_P(FullyShard, SharedParameters) {
  run_ranks(3, [](const ProcessGroupPtr&) {
    TwoLinears model;
    fsdp::tie(*model->first, model->first->weight, *model->second, model->second->weight);
    testing::init_parameters(*model);
    TwoLinears reference;
    fsdp::tie(*reference->first, reference->first->weight, *reference->second,
              reference->second->weight);
    testing::copy_parameters(*model, *reference);
    fully_shard(*model, {.layout = GetParam()});
    const auto params = model->named_parameters();
    EXPECT_TRUE(params["first.weight"].is_same(params["second.weight"]));
    const at::Tensor x = at::ones({2, 4});
    model(x).sum().backward();
    reference(x).sum().backward();
    EXPECT_TRUE(full_tensor(params["second.weight"].grad())
                    .allclose(reference->first->weight.grad(), 1e-6, 1e-6));

    TwoLinears other;
    fsdp::tie(*other->first, other->first->weight, *other->second, other->second->weight);
    fully_shard(*other->first, {.layout = GetParam()});
    expect_message<ConfigError>([&] { fully_shard(*other->second, {.layout = GetParam()}); },
                                "'weight' is shared with a module that was sharded on its own");
    expect_message<ConfigError>([&] { fully_shard(*other, {.layout = GetParam()}); },
                                "'second.weight' is shared");
    MLP mlp(4);
    expect_message<ConfigError>(
        [&] {
          fsdp::tie(*mlp->in_proj, mlp->in_proj->weight, *mlp->out_proj, mlp->out_proj->weight);
        },
        "must agree in dtype, shape and device");
    expect_message<ConfigError>(
        [&] { fsdp::tie(*mlp, mlp->in_proj->bias, *mlp->out_proj, mlp->out_proj->bias); },
        "is not a parameter of the module");
  });
}

// Promise: frozen parameters are gathered, get no gradient, and do not disturb those of the others.
TEST_P(FullyShard, FrozenParameters) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    TwoLinears model;
    TwoLinears reference;
    testing::init_parameters(*model);
    testing::init_parameters(*reference);
    for (auto* m : {&model, &reference}) {
      (*m)->first->weight.set_requires_grad(false);
      (*m)->second->bias.set_requires_grad(false);
    }
    fully_shard(*model->first, {.layout = GetParam()});
    fully_shard(*model, {.layout = GetParam()});
    const at::Tensor x = at::ones({2, 4});
    model(x).sum().backward();
    reference(x).sum().backward();
    for (const auto& entry : model->named_parameters()) {
      const at::Tensor expected = reference->named_parameters()[entry.key()].grad();
      ASSERT_EQ(entry.value().grad().defined(), expected.defined()) << entry.key();
      if (expected.defined()) EXPECT_TRUE(full_tensor(entry.value().grad()).allclose(expected));
    }
    // Unfrozen on the sharded parameter, it trains from the next gather on.
    for (auto& param : model->parameters()) param.mutable_grad().reset();
    model->named_parameters()["first.weight"].set_requires_grad(true);
    model(x).sum().backward();
    EXPECT_TRUE(model->named_parameters()["first.weight"].grad().defined());
  });
}

// Promise: weights loaded or converted after sharding are the ones that the next forward uses.
TEST_P(FullyShard, LoadAndConvertAfterSharding) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    TwoLinears source;
    TwoLinears model;
    testing::init_parameters(*source, /*seed=*/1);
    fully_shard(*source, {.layout = GetParam()});
    fully_shard(*model, {.layout = GetParam()});
    const at::Tensor x = at::randn({2, 4});
    const at::Tensor expected = source(x);
    torch::serialize::OutputArchive archive;
    source->TwoLinearsImpl::save(archive);  // this rank's parts, which torch::save refuses to write
    std::stringstream stream;
    archive.save_to(stream);
    torch::load(model, stream);  // set_data: leaves the flat shard
    EXPECT_TRUE(model(x).equal(expected));
    model->to(at::kDouble);
    EXPECT_TRUE(model(x.to(at::kDouble)).allclose(expected.to(at::kDouble), 1e-5, 1e-6));
    EXPECT_EQ(model->parameters()[0].scalar_type(), at::kDouble);

    at::Tensor param = model->parameters()[0];
    param.set_data(at::zeros({5, 4}, at::kDouble));  // not this rank's part
    expect_message<StateError>([&] { model(x.to(at::kDouble)); },
                               "A whole tensor must be cut first");
  });
}

// Promise: parameters kept unsharded after a forward (the root's) are gathered anew for the next
// forward if the sharded ones were changed in between, by an optimizer or by hand.
TEST_P(FullyShard, ChangeWhileUnsharded) {
  run_ranks(3, [](const ProcessGroupPtr&) {
    TwoLinears model;
    TwoLinears reference;
    testing::init_parameters(*model);
    testing::init_parameters(*reference);
    fully_shard(*model, {.reshard_after_forward = false, .layout = GetParam()});
    const at::Tensor x = at::ones({2, 4});
    const c10::NoGradGuard no_grad;
    EXPECT_TRUE(model(x).equal(reference(x)));
    for (at::Tensor& param : model->parameters()) param.mul_(2);
    for (at::Tensor& param : reference->parameters()) param.mul_(2);
    EXPECT_TRUE(model(x).equal(reference(x)));
  });
}

}  // namespace
}  // namespace fsdp
