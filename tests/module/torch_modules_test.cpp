#include <functional>

#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "fsdp/fully_shard.h"
#include "fsdp/sharded_tensor.h"
#include "support/layouts.h"
#include "support/models.h"

// torch's own modules, sharded, against themselves. Their forwards read parameters in many ways:
// members, lists of flat weights (LSTM), children read directly (TransformerEncoderLayer).

namespace fsdp {
namespace {

at::Tensor fixed_randn(at::IntArrayRef sizes) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(3);
  return at::randn(sizes, generator);
}

// Runs `forward` on a plain and on a sharded module of equal weights; compares results, gradients
// of the input and of every parameter. Every rank has the same input, so the mean is the gradient.
template <class Holder>
void expect_same_training(const std::function<Holder()>& make,
                          const std::function<at::Tensor(Holder&, const at::Tensor&)>& forward,
                          const at::Tensor& input, Layout layout) {
  Holder plain = make();
  testing::init_parameters(*plain);
  const at::Tensor plain_input =
      input.is_floating_point() ? input.clone().set_requires_grad(true) : input;
  const at::Tensor expected = forward(plain, plain_input);
  expected.pow(2).sum().backward();

  run_ranks(3, [&](const ProcessGroupPtr&) {
    Holder model = make();
    testing::init_parameters(*model);
    fully_shard(*model, {.reshard_after_forward = true, .layout = layout});
    const at::Tensor x = input.is_floating_point() ? input.clone().set_requires_grad(true) : input;
    const at::Tensor y = forward(model, x);
    EXPECT_TRUE(y.equal(expected));
    y.pow(2).sum().backward();
    if (x.requires_grad()) EXPECT_TRUE(x.grad().allclose(plain_input.grad(), 1e-5, 1e-5));
    const auto plain_params = plain->named_parameters();
    for (const auto& entry : model->named_parameters()) {
      ASSERT_TRUE(entry.value().grad().defined()) << entry.key();
      EXPECT_NE(spec_of(entry.value()), nullptr) << entry.key();
      EXPECT_TRUE(
          full_tensor(entry.value().grad()).allclose(plain_params[entry.key()].grad(), 1e-4, 1e-5))
          << entry.key();
    }
  });
}

class TorchModules : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(TorchModules);

// Promise: every kind of torch module with parameters computes and learns sharded what it does
// unsharded; the second forward too, after the parameters have moved in memory.
TEST_P(TorchModules, TrainShardedAsUnsharded) {
  using torch::nn::Conv2dOptions;
  const auto plain_call = [](auto& model, const at::Tensor& x) -> at::Tensor {
    model(x);
    return model(x);
  };
  expect_same_training<fsdp::nn::Linear>([] { return fsdp::nn::Linear(5, 7); }, plain_call,
                                         fixed_randn({3, 5}), GetParam());
  expect_same_training<fsdp::nn::Embedding>([] { return fsdp::nn::Embedding(7, 4); }, plain_call,
                                            at::arange(6).view({2, 3}), GetParam());
  expect_same_training<fsdp::nn::LayerNorm>(
      [] { return fsdp::nn::LayerNorm(torch::nn::LayerNormOptions({5})); }, plain_call,
      fixed_randn({3, 5}), GetParam());
  expect_same_training<fsdp::nn::GroupNorm>(
      [] { return fsdp::nn::GroupNorm(torch::nn::GroupNormOptions(2, 4)); }, plain_call,
      fixed_randn({3, 4, 5}), GetParam());
  expect_same_training<fsdp::nn::Conv2d>([] { return fsdp::nn::Conv2d(Conv2dOptions(2, 5, 3)); },
                                         plain_call, fixed_randn({2, 2, 6, 6}), GetParam());
  expect_same_training<fsdp::nn::ConvTranspose2d>(
      [] { return fsdp::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(2, 5, 3)); },
      [](auto& model, const at::Tensor& x) -> at::Tensor { return model(x); },
      fixed_randn({2, 2, 6, 6}), GetParam());
  expect_same_training<fsdp::nn::BatchNorm2d>([] { return fsdp::nn::BatchNorm2d(4); }, plain_call,
                                              fixed_randn({3, 4, 5, 5}), GetParam());
  expect_same_training<fsdp::nn::PReLU>([] { return fsdp::nn::PReLU(); }, plain_call,
                                        fixed_randn({3, 5}), GetParam());
  expect_same_training<fsdp::nn::LSTM>(
      [] { return fsdp::nn::LSTM(torch::nn::LSTMOptions(5, 4).num_layers(2)); },
      [](auto& model, const at::Tensor& x) -> at::Tensor { return std::get<0>(model(x)); },
      fixed_randn({4, 2, 5}), GetParam());
  expect_same_training<fsdp::nn::GRU>(
      [] { return fsdp::nn::GRU(torch::nn::GRUOptions(5, 4)); },
      [](auto& model, const at::Tensor& x) -> at::Tensor { return std::get<0>(model(x)); },
      fixed_randn({4, 2, 5}), GetParam());
  expect_same_training<fsdp::nn::MultiheadAttention>(
      [] { return fsdp::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(6, 2)); },
      [](auto& model, const at::Tensor& x) -> at::Tensor { return std::get<0>(model(x, x, x)); },
      fixed_randn({4, 2, 6}), GetParam());
  expect_same_training<fsdp::nn::TransformerEncoderLayer>(
      [] {
        return fsdp::nn::TransformerEncoderLayer(
            torch::nn::TransformerEncoderLayerOptions(6, 2).dim_feedforward(11).dropout(0));
      },
      plain_call, fixed_randn({4, 2, 6}), GetParam());
  expect_same_training<fsdp::nn::Sequential>(
      [] {
        return fsdp::nn::Sequential(fsdp::nn::Linear(5, 7), torch::nn::ReLU(),
                                    fsdp::nn::Linear(7, 3));
      },
      [](auto& model, const at::Tensor& x) -> at::Tensor { return model->forward(x); },
      fixed_randn({3, 5}), GetParam());
}

// Promise: buffers keep their values and are updated in place, as unsharded.
TEST_P(TorchModules, BuffersStay) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    fsdp::nn::BatchNorm1d model(4);
    fully_shard(*model, {.layout = GetParam()});
    model(fixed_randn({8, 4}));
    EXPECT_EQ(model->num_batches_tracked.item<int64_t>(), 1);
    EXPECT_FALSE(model->running_mean.equal(at::zeros({4})));
  });
}

}  // namespace
}  // namespace fsdp
