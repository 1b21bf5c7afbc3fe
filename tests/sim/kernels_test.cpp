// The simulated device computes what the CPU computes, in every order of execution.

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include "fsdp/sim.h"

namespace fsdp {
namespace {

class Kernels : public ::testing::TestWithParam<sim::Execution> {
 protected:
  void SetUp() override {
    sim::enable();
    sim::set_execution(GetParam());
  }
  void TearDown() override {
    sim::set_execution(sim::Execution::kEager);
    EXPECT_TRUE(sim::take_races().empty());
  }

  // The same work on both devices gives the same bits.
  static void expect_same(const std::function<at::Tensor(c10::Device)>& work) {
    const at::Tensor expected = work(c10::Device(c10::kCPU));
    const at::Tensor found = work(sim::device()).cpu();
    EXPECT_EQ(found.dtype(), expected.dtype());
    EXPECT_TRUE(at::equal(found, expected)) << found << "\n" << expected;
  }
};

at::Tensor numbers(c10::IntArrayRef sizes, c10::Device device) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return at::arange(numel, at::kFloat).view(sizes).sin().to(device);
}

TEST_P(Kernels, TrainsAsTheCpuDoes) {
  expect_same([](c10::Device device) {
    torch::manual_seed(0);
    torch::nn::Sequential net(torch::nn::Linear(8, 16),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})),
                              torch::nn::GELU(), torch::nn::Linear(16, 4));
    net->to(device);
    torch::optim::AdamW adamw(net->parameters());
    for (int step = 0; step < 3; ++step) {
      adamw.zero_grad();
      net->forward(numbers({3, 8}, device)).pow(2).sum().backward();
      adamw.step();
    }
    std::vector<at::Tensor> flat;
    for (const at::Tensor& parameter : net->parameters())
      flat.push_back(parameter.detach().flatten());
    return at::cat(flat);
  });
}

TEST_P(Kernels, ViewsInPlaceAndOut) {
  expect_same([](c10::Device device) {
    at::Tensor a = numbers({4, 6}, device);
    a.t().narrow(0, 1, 3).mul_(2);
    a.select(1, 0).copy_(a.select(1, 5));
    at::Tensor out = at::empty({0}, a.options());
    at::mm_out(out, a, a.t());
    at::Tensor halves = at::empty({4, 4}, a.options().dtype(at::kBFloat16));
    halves.copy_(out);
    return at::cat(
        {out.view({-1}), halves.to(at::kFloat).view({-1}), a.unfold(0, 2, 1).reshape({-1})});
  });
}

TEST_P(Kernels, IndicesListsAndValues) {
  expect_same([](c10::Device device) {
    at::Tensor a = numbers({5, 3}, device);
    at::Tensor picked = a.index({at::tensor({0, 2, 4}).to(device)});
    at::Tensor kept = a.masked_select(a.gt(0));
    auto parts = at::split(a, 2);
    at::_foreach_mul_(parts, 3);
    at::Tensor found = at::nonzero(a.gt(1)).to(at::kFloat);
    const double total = a.sum().item<double>();
    return at::cat({picked.view({-1}), kept, a.view({-1}), found.reshape({-1}),
                    at::full({1}, total, a.options())});
  });
}

TEST_P(Kernels, Attention) {
  for (const bool is_causal : {false, true}) {
    expect_same([&](c10::Device device) {
      at::Tensor q = numbers({2, 4, 8, 16}, device).set_requires_grad(true);
      at::Tensor out = at::scaled_dot_product_attention(q, q.cos(), q * 2, {}, 0, is_causal);
      out.pow(2).sum().backward();
      return at::cat({out.detach(), q.grad()});
    });
  }
}

TEST_P(Kernels, EmbeddingAndCrossEntropy) {
  expect_same([](c10::Device device) {
    torch::manual_seed(1);
    torch::nn::Embedding embedding(10, 8);
    embedding->to(device);
    const at::Tensor targets = at::arange(10).remainder(8).to(device);
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        embedding->forward(at::arange(10).to(device)), targets);
    loss.backward();
    return at::cat({loss.detach().view({1}), embedding->weight.grad().flatten()});
  });
}

// Random numbers: those of the device's own generator, the same after the same seed.
TEST_P(Kernels, RandomNumbers) {
  const auto draw = [] {
    torch::manual_seed(3);
    const at::Tensor x = at::ones({100}, sim::device());
    return at::cat({at::dropout(x, 0.5, true), at::randn({10}, x.options()),
                    at::empty_like(x).uniform_()})
        .cpu();
  };
  const at::Tensor first = draw();
  EXPECT_TRUE(at::equal(first, draw()));
  torch::manual_seed(4);
  EXPECT_FALSE(at::equal(first.narrow(0, 0, 100),
                         at::dropout(at::ones({100}, sim::device()), 0.5, true).cpu()));
}

std::string name_of(const ::testing::TestParamInfo<sim::Execution>& info) {
  static const std::vector<std::string> names = {"Eager", "LateSideStreams", "LateDefaultStreams",
                                                 "Late"};
  return names.at(static_cast<size_t>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Execution, Kernels,
                         ::testing::Values(sim::Execution::kEager, sim::Execution::kLateSideStreams,
                                           sim::Execution::kLateDefaultStreams,
                                           sim::Execution::kLate),
                         name_of);

}  // namespace
}  // namespace fsdp
