#include <algorithm>
#include <limits>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/module.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "support/layouts.h"

namespace fsdp {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Whole parameters with gradients; the last is to stay plain. 1 and 3 rows: fewer than ranks.
std::vector<at::Tensor> whole_params() {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(7);
  std::vector<at::Tensor> params;
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{7, 3}, {1}, {3, 2}, {16}, {5, 5}}) {
    params.push_back(at::zeros(sizes).set_requires_grad(true));
    params.back().mutable_grad() = at::randn(sizes, generator);
  }
  return params;
}

struct HolderImpl : torch::nn::Module {
  explicit HolderImpl(const std::vector<at::Tensor>& params) {
    for (size_t i = 0; i < params.size(); ++i) {
      held.push_back(register_parameter(std::to_string(i), params[i].detach().clone()));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
  std::vector<at::Tensor> held;
};
FSDP_MODULE(Holder);

std::vector<at::Tensor> sharded_params(Layout layout) {
  const std::vector<at::Tensor> whole = whole_params();
  Holder holder(whole);
  fully_shard(*holder, {.ignored_params = {holder->parameters().back()}, .layout = layout});
  std::vector<at::Tensor> params = holder->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& grad = whole[i].grad();
    params[i].mutable_grad() = spec_of(params[i]) ? distribute_tensor(grad, params[i]) : grad;
  }
  return params;
}

class ClipGradNormTest : public ::testing::TestWithParam<std::tuple<int, double, Layout>> {};

// Promise: norm and clipped gradients are those of torch's function on the whole tensors, on every
// rank, plain parameters counted once, empty shards taking part.
TEST_P(ClipGradNormTest, EqualsTorchOnWholeTensors) {
  const auto& [world_size, norm_type, layout] = GetParam();
  for (const double max_norm : {0.5, 1e6}) {
    std::vector<at::Tensor> reference = whole_params();
    const double norm = torch::nn::utils::clip_grad_norm_(reference, max_norm, norm_type);
    run_ranks(world_size, [&, norm_type = norm_type, layout = layout](const ProcessGroupPtr&) {
      const std::vector<at::Tensor> params = sharded_params(layout);
      EXPECT_EQ(std::count_if(params.begin(), params.end(), spec_of), 4);
      const at::Tensor total = clip_grad_norm_(params, max_norm, {.norm_type = norm_type});
      EXPECT_NEAR(total.item<double>(), norm, 1e-5 * norm);
      for (size_t i = 0; i < params.size(); ++i) {
        EXPECT_TRUE(full_tensor(params[i].grad()).allclose(reference[i].grad(), 1e-5, 1e-7)) << i;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, ClipGradNormTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 8),
                                            ::testing::Values(2.0, 1.0, 3.5, kInfinity),
                                            testing::layouts()));

// Promise: no gradients give 0; a norm that is not finite is an error when asked for.
TEST(ClipGradNorm, EdgeCases) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const DeviceMeshPtr mesh = init_device_mesh(c10::DeviceType::CPU);
    at::Tensor param = distribute_tensor(at::zeros({4}), mesh).set_requires_grad(true);
    EXPECT_EQ(clip_grad_norm_({param}, 1.0).item<float>(), 0.0f);
    EXPECT_EQ(clip_grad_norm_({}, 1.0).item<float>(), 0.0f);
    param.mutable_grad() = distribute_tensor(at::zeros({4}), mesh);
    if (group->getRank() == 1) param.mutable_grad().fill_(kInfinity);  // seen by both ranks
    try {
      clip_grad_norm_({param}, 1.0, {.error_if_nonfinite = true});
      ADD_FAILURE() << "an infinite norm was accepted";
    } catch (const StateError& error) {
      EXPECT_NE(message_of(error).find("total norm of the gradients is inf"), std::string::npos);
    }
    EXPECT_THROW(clip_grad_norm_({param}, 1.0, {.norm_type = 0}), ConfigError);
  });
}

}  // namespace
}  // namespace fsdp
