// Which device a model is on before, during and after fully_shard().

#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>

#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/module.h"
#include "fsdp/nn.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "sim/npu_ranks.h"
#include "support/messages.h"
#include "support/models.h"

namespace fsdp {
namespace {

using testing::message_thrown_by;
using testing::MLP;

class DeviceMoves : public testing::NpuTest {};
FSDP_ON_NPUS(DeviceMoves);

// An MLP and a scale that it multiplies with, and a buffer.
struct ScaledImpl : torch::nn::Module {
  ScaledImpl()
      : mlp(register_module("mlp", MLP(5))),
        scale(register_parameter("scale", at::full({5}, 2.0))),
        offset(register_buffer("offset", at::ones({5}))) {}
  at::Tensor forward(const at::Tensor& x) { return mlp(x) * scale + offset; }
  MLP mlp;
  at::Tensor scale, offset;
};
FSDP_MODULE(Scaled);

std::vector<at::Tensor> whole(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors)
    result.push_back(full_tensor(tensor).detach().cpu().clone());
  return result;
}

// Promise (test_move_states_to_device_tensor): parameters and buffers of a model on the CPU are
// moved to the mesh's device, with their values.
TEST_P(DeviceMoves, test_move_states_to_device_tensor) {
  testing::run_npu_ranks(3, devices(), [&](const auto&, const auto& device) {
    Scaled model;
    testing::init_parameters(*model);
    const std::vector<at::Tensor> before = whole(model->parameters());
    fully_shard(*model, {.mesh = init_device_mesh(device.type()), .layout = layout()});
    for (const at::Tensor& param : model->parameters()) EXPECT_EQ(param.device(), device);
    EXPECT_EQ(model->offset.device(), device);
    const std::vector<at::Tensor> after = whole(parameters(*model));
    ASSERT_EQ(after.size(), before.size());
    for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(after[i].equal(before[i])) << i;
  });
}

// Promise (test_move_states_to_device_ignored_param_device): ignored parameters stay where they
// are, to() moves them later, and leaves the sharded ones, which train then.
TEST_P(DeviceMoves, test_move_states_to_device_ignored_param_device) {
  testing::run_npu_ranks(2, devices(), [&](const auto&, const auto& device) {
    Scaled model;
    testing::init_parameters(*model);
    Scaled reference;
    testing::init_parameters(*reference);
    fully_shard(*model, {.mesh = init_device_mesh(device.type()),
                         .ignored_params = {model->scale},
                         .layout = layout()});
    EXPECT_TRUE(model->scale.is_cpu());
    for (const at::Tensor& param : parameters(*model->mlp)) EXPECT_EQ(param.device(), device);
    model->to(device);
    EXPECT_EQ(model->scale.device(), device);
    EXPECT_EQ(model->scale.sizes(), at::IntArrayRef({5}));
    const at::Tensor x = at::arange(10.0).view({2, 5});
    reference(x).sum().backward();
    model(x.to(device)).sum().backward();
    EXPECT_TRUE(model->scale.grad().cpu().equal(reference->scale.grad()));
    const auto found = parameters(*model->mlp);
    const auto expected = reference->mlp->parameters();
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(full_tensor(found[i].grad()).cpu().allclose(expected[i].grad())) << i;
    }
  });
}

// Promise (test_move_states_to_device_dtensor_valid, as far as there are no DTensors): what is on
// the device already is sharded from there, what is not is moved; below it may be sharded modules.
TEST_P(DeviceMoves, test_move_states_to_device_dtensor_valid) {
  testing::run_npu_ranks(4, devices(), [&](const auto&, const auto& device) {
    Scaled model;
    testing::init_parameters(*model);
    const auto before = whole(model->parameters());
    const FullyShardOptions options{.mesh = init_device_mesh(device.type()), .layout = layout()};
    model->mlp->in_proj->to(device);
    fully_shard(*model->mlp, options);
    fully_shard(*model, options);
    for (const at::Tensor& param : model->parameters()) EXPECT_EQ(param.device(), device);
    const auto after = whole(model->parameters());
    for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(after[i].equal(before[i])) << i;
  });
}

// Promise (test_move_states_to_device_dtensor_invalid): a tree on two types of device, or on two
// devices of a type, is refused, and nothing has changed.
TEST_P(DeviceMoves, test_move_states_to_device_dtensor_invalid) {
  testing::run_npu_ranks(4, devices(), [&](const auto& group, const auto& device) {
    Scaled model;
    testing::init_parameters(*model);
    const FullyShardOptions on_npu{.mesh = init_device_mesh(device.type()), .layout = layout()};
    const FullyShardOptions on_cpu{.mesh = init_device_mesh(c10::kCPU), .layout = layout()};
    fully_shard(*model->mlp, on_cpu);
    const auto message = [&](Scaled& scaled) {
      return message_thrown_by([&] { fully_shard(*scaled, on_npu); });
    };
    EXPECT_TRUE(testing::contains(message(model),
                                  "ScaledImpl> was sharded on cpu, but the mesh of "
                                  "this call is on " +
                                      device.str()))
        << message(model);
    EXPECT_TRUE(model->scale.is_cpu());
    EXPECT_TRUE(model->offset.is_cpu());
    EXPECT_FALSE(model->is_fully_sharded());

    Scaled other;
    fully_shard(*other->mlp, on_npu);
    const c10::DeviceGuard guard(sim::device(static_cast<int>(device.index() + 1)));
    EXPECT_TRUE(testing::contains(message(other), "ScaledImpl> was sharded on " + device.str()))
        << message(other);
    EXPECT_FALSE(other->is_fully_sharded());
    fully_shard(*model, on_cpu);
    EXPECT_EQ(full_tensor(parameters(*model->mlp)[0]).size(0), 20);
    (void)group;
  });
}

}  // namespace
}  // namespace fsdp
