#include <map>
#include <string>

#include <ATen/RedispatchFunctions.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/utils.h>

#include "fsdp/activation.h"
#include "support/counting_allocator.h"
#include "support/messages.h"

// What is kept instead of recomputed: results of chosen operators, and tensors on the host.

namespace fsdp {
namespace {

using testing::expect_message;
using Tensors = std::vector<at::Tensor>;

// How often operators were really computed on this thread. BackendSelect lies right above the
// kernels, below the library's interceptor.
thread_local std::map<std::string, int> num_computed;
constexpr auto kBelow =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

at::Tensor counting_addmm(c10::DispatchKeySet keys, const at::Tensor& bias, const at::Tensor& a,
                          const at::Tensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  ++num_computed["addmm"];
  return at::redispatch::addmm(keys & kBelow, bias, a, b, beta, alpha);
}
at::Tensor counting_tanh(c10::DispatchKeySet keys, const at::Tensor& x) {
  ++num_computed["tanh"];
  return at::redispatch::tanh(keys & kBelow, x);
}
std::tuple<at::Tensor, at::Tensor> counting_attention(c10::DispatchKeySet keys, const at::Tensor& q,
                                                      const at::Tensor& k, const at::Tensor& v,
                                                      double dropout, bool is_causal,
                                                      const std::optional<at::Tensor>& mask,
                                                      std::optional<double> scale) {
  ++num_computed["attention"];
  return at::redispatch::_scaled_dot_product_flash_attention_for_cpu(
      keys & kBelow, q, k, v, dropout, is_causal, mask, scale);
}
TORCH_LIBRARY_IMPL(aten, BackendSelect, library) {
  library.impl("addmm", TORCH_FN(counting_addmm));
  library.impl("tanh", TORCH_FN(counting_tanh));
  library.impl("_scaled_dot_product_flash_attention_for_cpu", TORCH_FN(counting_attention));
}

constexpr int64_t kDim = 8;

at::Tensor leaf(at::IntArrayRef sizes) { return at::randn(sizes).set_requires_grad(true); }

// Three linears with attention and tanh between.
struct Block {
  at::Tensor w1 = leaf({kDim, kDim}), w2 = leaf({kDim, kDim}), w3 = leaf({kDim, kDim});
  at::Tensor bias = leaf({kDim});

  at::Tensor operator()(const at::Tensor& x) const {
    const at::Tensor h = at::linear(x, w1, bias).tanh().view({1, 1, -1, kDim});
    const at::Tensor attended = at::scaled_dot_product_attention(h, h, h).view({-1, kDim});
    return at::linear(at::linear(attended, w2, bias).tanh(), w3, bias).tanh();
  }
  [[nodiscard]] Tensors leaves() const { return {w1, w2, w3, bias}; }
};

Tensors grads_of(const std::function<at::Tensor()>& function, Tensors leaves) {
  num_computed.clear();
  function().square().sum().backward();
  Tensors grads;
  for (at::Tensor& tensor : leaves) grads.push_back(std::exchange(tensor.mutable_grad(), {}));
  return grads;
}

void expect_bit_equal(const Tensors& ours, const Tensors& expected) {
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::equal(ours[i], expected[i])) << i;
}

using Counts = std::map<std::string, int>;

// Promise: what the policy saves is computed once, the rest twice, and gradients do not change.
TEST(SelectiveCheckpoint, SavesWhatThePolicySays) {
  const Block block;
  const at::Tensor x = leaf({4, kDim});
  Tensors leaves = block.leaves();
  leaves.push_back(x);
  const Tensors expected = grads_of([&] { return block(x); }, leaves);
  EXPECT_EQ(num_computed, (Counts{{"addmm", 3}, {"tanh", 3}, {"attention", 1}}));

  const auto with = [&](const CheckpointOptions& options) {
    return [&block, &x, options] { return checkpoint(options, block, x); };
  };
  expect_bit_equal(grads_of(with({.early_stop = false}), leaves), expected);
  EXPECT_EQ(num_computed, (Counts{{"addmm", 6}, {"tanh", 6}, {"attention", 2}}));
  expect_bit_equal(
      grads_of(with({.early_stop = false, .save_policy = save_matmuls_and_attention()}), leaves),
      expected);
  EXPECT_EQ(num_computed, (Counts{{"addmm", 3}, {"tanh", 6}, {"attention", 1}}));

  // A policy that counts: the second of the three linears alone.
  int index = 0;
  const auto second = [&index](const std::string& name) {
    return name == "aten::addmm" && ++index == 2;
  };
  expect_bit_equal(grads_of(with({.early_stop = false, .save_policy = second}), leaves), expected);
  EXPECT_EQ(num_computed["addmm"], 5);
  EXPECT_EQ(index, 3);
}

// Promise: in a graph that is kept the saved results serve each backward.
TEST(SelectiveCheckpoint, KeptGraphs) {
  const Block block;
  const at::Tensor x = leaf({4, kDim});
  const auto twice = [](const at::Tensor& y) {
    y.sum().backward({}, /*retain_graph=*/true);
    return y;
  };
  const Tensors expected = grads_of([&] { return twice(block(x)); }, block.leaves());
  const CheckpointOptions options{.save_policy = save_matmuls_and_attention()};
  expect_bit_equal(grads_of([&] { return twice(checkpoint(options, block, x)); }, block.leaves()),
                   expected);
  EXPECT_EQ(num_computed["addmm"], 3);
}

// Promise: a selective checkpoint around a plain one, and the reverse, and without a checkpoint no
// operator is intercepted.
TEST(SelectiveCheckpoint, Nested) {
  const Block block;
  const at::Tensor x = leaf({4, kDim});
  const CheckpointOptions selective{.save_policy = save_matmuls_and_attention()}, plain;
  const Tensors expected = grads_of([&] { return block(block(x)); }, block.leaves());
  for (const auto& [outer, inner] : {std::pair(selective, plain), std::pair(plain, selective),
                                     std::pair(selective, selective)}) {
    const auto around = [&block, inner = inner](const at::Tensor& t) {
      return checkpoint(inner, block, block(t));
    };
    const Tensors ours = grads_of([&] { return checkpoint(outer, around, x); }, block.leaves());
    expect_bit_equal(ours, expected);
  }
  EXPECT_FALSE(c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Fake));
}

// Promise: an operator that draws random numbers and is not computed again leaves the generator as
// it did in forward, so that what comes after it draws the same.
TEST(SelectiveCheckpoint, RandomNumbersAfterASavedOperator) {
  const at::Tensor x = leaf({64});
  const auto function = [](const at::Tensor& t) {
    return at::dropout((t * at::rand_like(t)).tanh(), 0.5, /*train=*/true).exp();
  };
  const auto saves_rand = [](const std::string& name) { return name == "aten::rand_like"; };
  torch::manual_seed(1);
  const Tensors expected = grads_of([&] { return function(x); }, {x});
  torch::manual_seed(1);
  expect_bit_equal(
      grads_of([&] { return checkpoint({.save_policy = saves_rand}, function, x); }, {x}),
      expected);
}

// Promise: a saved result that the function edits in place would be edited twice: an error.
TEST(SelectiveCheckpoint, EditedResultsAreErrors) {
  const at::Tensor x = leaf({4, kDim}), weight = leaf({kDim, kDim}), bias = leaf({kDim});
  const auto edits = [&](const at::Tensor& t) {
    return at::linear(t, weight, bias).add_(1).tanh().exp();
  };
  const at::Tensor y = checkpoint({.save_policy = save_matmuls_and_attention()}, edits, x);
  expect_message<StateError>([&] { y.sum().backward(); },
                             "a result of aten::addmm that the policy saves was edited in place");
}

// Promise: saved results cost their bytes, and are freed with the graph.
TEST(SelectiveCheckpoint, Memory) {
  const Block block;
  const at::Tensor x = leaf({256, kDim});
  const testing::CountingAllocator allocator;
  const int64_t before = allocator.live_bytes();
  const auto addmm = [](const std::string& name) { return name == "aten::addmm"; };
  at::Tensor y = checkpoint({.preserve_rng_state = false, .save_policy = addmm}, block, x);
  EXPECT_EQ(allocator.live_bytes() - before, 4 * 256 * kDim * (3 + 1));
  y.reset();
  EXPECT_EQ(allocator.live_bytes(), before);
}

// Promise: offloaded activations give bit-equal gradients; nothing is computed again; each tensor
// is copied once, and parameters are not.
TEST(OffloadActivations, CopiesActivationsOnce) {
  const at::Tensor x = leaf({256, kDim}), w1 = leaf({kDim, kDim}), w2 = leaf({kDim, kDim});
  const auto function = [&](const at::Tensor& t) {
    const at::Tensor h = t.tanh();  // saved by tanh and by both products
    return at::linear(h, w1) * at::linear(h, w2);
  };
  const Tensors leaves{x, w1, w2};
  const Tensors expected = grads_of([&] { return function(x); }, leaves);
  const auto offloaded = [&] { return offload_activations(function, x); };
  expect_bit_equal(grads_of(offloaded, leaves), expected);
  EXPECT_EQ(num_computed["tanh"], 1);
  expect_bit_equal(
      grads_of([&] { return checkpoint({.offload_to_host = true}, function, x); }, leaves),
      expected);

  const testing::CountingAllocator allocator;
  const int64_t before = allocator.live_bytes();
  at::Tensor y = offloaded();
  const int64_t activation_bytes = 4 * 256 * kDim;
  EXPECT_EQ(allocator.live_bytes() - before, activation_bytes * (3 + 1));  // h, two products, y
  y.sum().backward();
}

// Promise: around checkpoint() it moves the inputs of what is recomputed, and only them; an edit in
// place after the copy does no harm.
TEST(OffloadActivations, AroundCheckpoint) {
  const Block block;
  const at::Tensor x = leaf({4, kDim});
  const auto both = [&](const at::Tensor& t) { return checkpoint(block, t.tanh()); };
  const Tensors expected = grads_of([&] { return block(x.tanh()); }, block.leaves());
  expect_bit_equal(grads_of([&] { return offload_activations(both, x); }, block.leaves()),
                   expected);
  EXPECT_EQ(num_computed["addmm"], 3 + 3);

  const auto edits = [](const at::Tensor& t) {
    at::Tensor y = t.exp();
    const at::Tensor z = y.sin();
    y.add_(1);
    return z + y;
  };
  const at::Tensor t = leaf({3});
  offload_activations(edits, t).sum().backward();
  EXPECT_TRUE(t.grad().allclose(t.exp() * (t.exp().cos() + 1)));
}

}  // namespace
}  // namespace fsdp
