#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "fsdp/fully_shard.h"
#include "reference/world.h"
#include "support/layouts.h"
#include "support/models.h"

// Class UnshardMultiThread of the reference suite.

namespace fsdp {
namespace {

using testing::run_world;

class UnshardMultiThread : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(UnshardMultiThread);

struct TwoLinearsImpl : torch::nn::Module {
  TwoLinearsImpl() {
    first = register_module("0", fsdp::nn::Linear(4, 4));
    second = register_module("1", fsdp::nn::Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  fsdp::nn::Linear first{nullptr};
  fsdp::nn::Linear second{nullptr};
};
FSDP_MODULE(TwoLinears);

// Promise: a module without parameters of its own has a handle to wait for, and nothing happens.
TEST_P(UnshardMultiThread, test_unshard_no_param_group) {
  run_world(2, [](const ProcessGroupPtr&) {
    TwoLinears model;
    fully_shard(*model->first, testing::shard_options(GetParam()));
    fully_shard(*model->second, testing::shard_options(GetParam()));
    FSDPModule& root = fully_shard(*model, testing::shard_options(GetParam()));
    UnshardHandle handle = root.unshard_async();
    handle.wait();
    EXPECT_TRUE(root.unsharded_parameters().empty());
    EXPECT_ANY_THROW(model->first->weight.sum());
  });
}

// Promise: unshard before any forward gives the whole parameters.
TEST_P(UnshardMultiThread, test_unshard_without_lazy_init) {
  run_world(2, [](const ProcessGroupPtr&) {
    testing::MLP model(4);
    testing::MLP reference(4);
    testing::init_parameters(*model);
    testing::init_parameters(*reference);
    FSDPModule& root = fully_shard(*model, testing::shard_options(GetParam()));
    root.unshard();
    const auto expected = reference->named_parameters();
    const auto unsharded = root.unsharded_parameters();
    ASSERT_EQ(unsharded.size(), expected.size());
    for (const auto& [name, param] : unsharded) {
      EXPECT_EQ(param.device(), testing::suite_device()) << name;
      EXPECT_TRUE(param.detach().cpu().equal(expected[name])) << name;
    }
  });
}

}  // namespace
}  // namespace fsdp
