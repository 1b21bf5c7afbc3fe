// What the methods of FSDPModule change about a group's reduction: sums instead of means in the
// collectives, and a hook behind them.

#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/nn.h"
#include "fsdp/sharded_tensor.h"
#include "support/layouts.h"
#include "support/messages.h"
#include "support/training.h"

namespace fsdp {
namespace {

using testing::message_thrown_by;
using testing::Transformer;

class ForceSumReduction : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(ForceSumReduction);

// The gradient of a weight of one element after a backward in which rank r has `grads[r]`.
double reduced(const std::vector<float>& grads, bool force_sum, Layout layout,
               const std::vector<int64_t>& mesh_shape) {
  double found = 0;
  run_ranks(static_cast<int>(grads.size()), [&](const ProcessGroupPtr& group) {
    fsdp::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
    const auto names = mesh_shape.size() == 2 ? std::vector<std::string>{"replicate", "shard"}
                                              : std::vector<std::string>{};
    fully_shard(*model, {.mesh = init_device_mesh(c10::DeviceType::CPU, mesh_shape, names),
                         .mp_policy = {.reduce_dtype = at::kBFloat16},
                         .layout = layout});
    model->set_force_sum_reduction_for_comms(force_sum);
    model(at::full({1, 1}, grads[static_cast<size_t>(group->getRank())])).sum().backward();
    const double grad = full_tensor(model->parameters()[0].grad()).item<double>();
    if (group->getRank() == 0) found = grad;
  });
  return found;
}

// Promise (test_fully_shard_force_sum_reduce_scatter): the reduce-scatter averages, or when forced
// to, sums. In bf16 one sees which: 256 + 2 + 0.8125 is rounded to 258 before it is divided by 3,
// or divided and then rounded, to a multiple of 1/2.
TEST_P(ForceSumReduction, test_fully_shard_force_sum_reduce_scatter) {
  const std::vector<float> grads = {256, 2, 0.8125};
  EXPECT_EQ(reduced(grads, false, GetParam(), {3}), 86.5);
  EXPECT_EQ(reduced(grads, true, GetParam(), {3}), 86.0);
}

// Promise (test_fully_shard_force_sum_both_reductions): and so does the all-reduce. The replicas'
// sums are 258 and 0; their means 86.5 and 0.
TEST_P(ForceSumReduction, test_fully_shard_force_sum_both_reductions) {
  const std::vector<float> grads = {256, 2, 0.8125, 0, 0, 0};
  EXPECT_EQ(reduced(grads, false, GetParam(), {2, 3}), 43.25);
  EXPECT_EQ(reduced(grads, true, GetParam(), {2, 3}), 43.0);
}

class AllReduceHook : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(AllReduceHook);

using Prepare = std::function<void(Transformer&)>;

// Losses and parameters of rank 0 after three steps of 4 ranks.
testing::TrainingLog train(const FullyShardOptions& options, const Prepare& prepare) {
  testing::TrainingOptions training;
  training.batch_size = 8;
  training.num_steps = 3;
  testing::TrainingLog found;
  run_ranks(4, [&](const ProcessGroupPtr& group) {
    FullyShardOptions own = options;
    const DeviceMeshPtr mesh =
        init_device_mesh(c10::DeviceType::CPU, {2, 2}, {"replicate", "shard"});
    own.mesh = prepare ? (*mesh)["shard"] : mesh;
    const ProcessGroupPtr replicas = mesh->get_group(0);
    testing::TrainingLog log = testing::train(training, group, [&](Transformer& model) {
      testing::shard_blocks_and_root(model, own);
      if (!prepare) return;
      const auto hook = [replicas](const at::Tensor& reduced) {
        std::vector<at::Tensor> tensors{reduced};
        replicas->allreduce(tensors, {.reduceOp = c10d::ReduceOp::AVG})->wait();
      };
      for (auto& block : model->blocks) block->set_all_reduce_hook(hook);
      model->set_all_reduce_hook(hook);
      prepare(model);
    });
    if (group->getRank() == 0) found = std::move(log);
  });
  return found;
}

// Promise (test_custom_hsdp_all_reduce_hook): shards of two ranks each, with a hook that averages
// over the two pairs, train as over a mesh of replicas and shards, to the bit; in mixed precision
// the hook has the reduce dtype.
TEST_P(AllReduceHook, test_custom_hsdp_all_reduce_hook) {
  for (const bool mixed : {false, true}) {
    FullyShardOptions options{.layout = GetParam()};
    if (mixed) options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    const auto expected = train(options, nullptr);
    const auto found = train(options, [](Transformer&) {});
    ASSERT_EQ(found.losses, expected.losses);
    for (size_t i = 0; i < expected.names.size(); ++i) {
      EXPECT_TRUE(found.whole_params[i].equal(expected.whole_params[i])) << expected.names[i];
    }
    // Without the hook the pairs drift apart.
    const auto alone = train(options, [](Transformer& model) {
      for (auto& block : model->blocks) block->set_all_reduce_hook(nullptr);
      model->set_all_reduce_hook(nullptr);
    });
    EXPECT_NE(alone.losses, expected.losses);
  }
}

// Promise: with replicas the hook comes behind their all-reduce, in the reduce dtype,
// and before the division by 2 that fp64 leaves
// for last; what it writes is the gradient, and a backward that keeps a partial sum does not call
// it.
TEST_P(AllReduceHook, ComesBehindTheReplicas) {
  run_ranks(4, [&](const ProcessGroupPtr& group) {
    const DeviceMeshPtr mesh =
        init_device_mesh(c10::DeviceType::CPU, {2, 2}, {"replicate", "shard"});
    fsdp::nn::Linear model(torch::nn::LinearOptions(2, 3).bias(false));
    fully_shard(*model,
                {.mesh = mesh, .mp_policy = {.reduce_dtype = at::kDouble}, .layout = GetParam()});
    std::vector<at::Tensor> seen;
    model->set_all_reduce_hook([&](const at::Tensor& reduced) {
      seen.push_back(reduced.clone());
      reduced.add_(100);
    });
    const auto backward = [&] {
      model(at::full({1, 2}, group->getRank() * 4.0)).sum().backward();  // mean 6
    };
    model->set_requires_all_reduce(false);
    backward();
    EXPECT_TRUE(seen.empty());
    model->set_requires_all_reduce(true);
    backward();
    ASSERT_EQ(seen.size(), 1U);
    EXPECT_EQ(seen[0].dim(), 1);
    EXPECT_EQ(seen[0].scalar_type(), at::kDouble);
    EXPECT_EQ(seen[0].eq(2 * 12).sum().item<int64_t>(), model->parameters()[0].numel());
    EXPECT_TRUE(full_tensor(model->parameters()[0].grad()).equal(at::full({3, 2}, 12 + 50.0)));
  });
}

// Promise: what the hook throws comes out of backward on the rank that it was thrown on, and the
// next step is right.
TEST_P(AllReduceHook, MayThrow) {
  run_ranks(2, [&](const ProcessGroupPtr&) {
    fsdp::nn::Linear model(torch::nn::LinearOptions(2, 3).bias(false));
    fully_shard(*model, {.layout = GetParam()});
    model->set_all_reduce_hook([](const at::Tensor&) { throw std::runtime_error("hook"); });
    const auto backward = [&] { model(at::ones({1, 2})).sum().backward(); };
    EXPECT_TRUE(testing::contains(message_thrown_by([&] { backward(); }), "hook"));
    model->set_all_reduce_hook(nullptr);
    for (at::Tensor& param : model->parameters()) param.mutable_grad().reset();
    backward();
    EXPECT_TRUE(full_tensor(model->parameters()[0].grad()).equal(at::ones({3, 2})));
  });
}

// Promise (test_custom_hook_custom_stream): a stream of its own is refused with replicas, and one
// of another device always; nothing has changed then.
TEST_P(AllReduceHook, RefusesStreams) {
  run_ranks(2, [&](const ProcessGroupPtr&) {
    const c10::Stream stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU));
    const c10::Stream other(c10::Stream::DEFAULT, c10::Device(c10::kCUDA, 0));
    fsdp::nn::Linear model(torch::nn::LinearOptions(2, 3).bias(false));
    fully_shard(*model,
                {.mesh = init_device_mesh(c10::DeviceType::CPU, {2, 1}, {"replicate", "shard"}),
                 .layout = GetParam()});
    bool called = false;
    model->set_all_reduce_hook([&](const at::Tensor&) { called = true; });
    const auto other_hook = [](const at::Tensor& reduced) { reduced.zero_(); };
    EXPECT_TRUE(testing::contains(
        message_thrown_by([&] { model->set_all_reduce_hook(other_hook, stream); }), "replicas"));
    fsdp::nn::Linear sharded(torch::nn::LinearOptions(2, 3).bias(false));
    fully_shard(*sharded, {.layout = GetParam()});
    EXPECT_TRUE(testing::contains(
        message_thrown_by([&] { sharded->set_all_reduce_hook(other_hook, other); }), "cuda"));
    model(at::ones({1, 2})).sum().backward();
    EXPECT_TRUE(called);
    EXPECT_TRUE(full_tensor(model->parameters()[0].grad()).equal(at::ones({3, 2})));
  });
}

}  // namespace
}  // namespace fsdp
