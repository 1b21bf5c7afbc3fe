#include <atomic>
#include <memory>
#include <thread>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/utils.h>

#include "fsdp/activation.h"
#include "fsdp/nn.h"
#include "support/counting_allocator.h"
#include "support/messages.h"
#include "support/models.h"

// checkpoint() gives the gradients that there would be without it, and keeps nothing for them.
// B batch, D dim.

namespace fsdp {
namespace {

using testing::expect_message;
using Tensors = std::vector<at::Tensor>;

struct KeyValue {
  at::Tensor key;
  std::optional<at::Tensor> value;
  double scale = 1;
};

}  // namespace

template <>
struct TensorTraits<KeyValue> : TensorFields<&KeyValue::key, &KeyValue::value> {};

namespace {

constexpr int64_t kBatch = 4;
constexpr int64_t kDim = 8;

at::Tensor leaf(at::IntArrayRef sizes, uint64_t seed = 7) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::empty(sizes).normal_(0, 1, generator).set_requires_grad(true);
}

// Two linears with something that saves its output between, and a count of its calls.
struct Net {
  at::Tensor up = leaf({4 * kDim, kDim}, 1), down = leaf({kDim, 4 * kDim}, 2);
  std::shared_ptr<int> num_calls = std::make_shared<int>(0);

  at::Tensor operator()(const at::Tensor& x_BD) const {
    ++*num_calls;
    return at::linear(at::silu(at::linear(x_BD, up)).tanh(), down);
  }
};

// The gradients of `function` at these leaves, which lose them again.
Tensors grads_of(const std::function<at::Tensor()>& function, Tensors leaves) {
  function().square().sum().backward();
  Tensors grads;
  for (at::Tensor& tensor : leaves) grads.push_back(std::exchange(tensor.mutable_grad(), {}));
  return grads;
}

void expect_bit_equal(const Tensors& ours, const Tensors& expected) {
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    ASSERT_EQ(ours[i].defined(), expected[i].defined()) << i;
    if (!ours[i].defined()) continue;
    EXPECT_TRUE(at::equal(ours[i], expected[i])) << i;
  }
}

// Promise: gradients are bit-equal, and backward calls the function once more. (The engine has run
// before: the expected gradients come first.)
TEST(Checkpoint, GradientsAreBitEqual) {
  const Net net;
  const at::Tensor x = leaf({kBatch, kDim});
  const Tensors expected = grads_of([&] { return net(x); }, {x, net.up, net.down});
  for (const bool early_stop : {true, false}) {
    *net.num_calls = 0;
    const auto checkpointed = [&] { return checkpoint({.early_stop = early_stop}, net, x); };
    expect_bit_equal(grads_of(checkpointed, {x, net.up, net.down}), expected);
    EXPECT_EQ(*net.num_calls, 2);
  }
}

// Promise: recomputation ends where the last saved tensor is there.
TEST(Checkpoint, StopsEarly) {
  int num_ends = 0;
  const auto function = [&](const at::Tensor& x) {
    at::Tensor y = x.exp() + 1;  // exp saves, the sum does not
    ++num_ends;
    return y;
  };
  const at::Tensor x = leaf({3});
  checkpoint(function, x).sum().backward();
  EXPECT_EQ(num_ends, 1);
  checkpoint({.early_stop = false}, function, x).sum().backward();
  EXPECT_EQ(num_ends, 3);
}

// Promise: a noexcept function, which an exception could not leave, and one that catches everything
// are recomputed to their ends.
TEST(Checkpoint, FunctionsThatCannotBeLeft) {
  const at::Tensor x = leaf({3});
  const auto cannot_throw = [](const at::Tensor& t) noexcept { return t.exp(); };
  expect_bit_equal(grads_of([&] { return checkpoint(cannot_throw, x); }, {x}),
                   grads_of([&] { return x.exp(); }, {x}));
  const auto catches = [](const at::Tensor& t) {
    at::Tensor y;
    try {
      y = t.exp();
    } catch (...) {
      y = t.exp();
    }
    return y.sin();
  };
  expect_bit_equal(grads_of([&] { return checkpoint(catches, x); }, {x}),
                   grads_of([&] { return x.exp().sin(); }, {x}));
}

// Promise: after forward only the inputs and outputs of a checkpointed function are alive, and
// after backward nothing is.
TEST(Checkpoint, KeepsNoActivations) {
  const Net net;
  const at::Tensor x = at::ones({256, kDim}).set_requires_grad(true);
  const testing::CountingAllocator allocator;
  const auto saved_bytes = [&](bool checkpointed) {
    const int64_t before = allocator.live_bytes();
    at::Tensor y = x;
    for (int i = 0; i < 4; ++i) {
      y = checkpointed ? checkpoint({.preserve_rng_state = false}, net, y) : net(y);
    }
    const int64_t saved = allocator.live_bytes() - before;
    y.sum().backward();
    y.reset();
    for (at::Tensor tensor : {x, net.up, net.down}) tensor.mutable_grad().reset();
    EXPECT_EQ(allocator.live_bytes(), before);
    return saved;
  };
  const int64_t activation_bytes = 4 * 256 * kDim;
  // Plain: the results of up and of tanh, each of 4 activations, and that of down.
  EXPECT_EQ(saved_bytes(false), 4 * (1 + 2 * 4) * activation_bytes);
  EXPECT_EQ(saved_bytes(true), 4 * activation_bytes);
}

// Promise: in backward one function's activations are alive at a time.
TEST(Checkpoint, RecomputesOneFunctionAtATime) {
  const Net net;
  at::Tensor y = at::ones({256, kDim}).set_requires_grad(true);
  testing::CountingAllocator allocator;
  for (int i = 0; i < 8; ++i) y = checkpoint(net, y);
  const int64_t before = allocator.live_bytes();
  allocator.take_peak_bytes();
  y.sum().backward();
  const int64_t activation_bytes = 4 * 256 * kDim;
  EXPECT_LT(allocator.take_peak_bytes() - before, 3 * 8 * activation_bytes);
}

// Promise: a tensor that was recomputed is freed when it has been used, also in a graph that is
// kept.
TEST(Checkpoint, FreesWhatWasUsed) {
  const at::Tensor x = at::ones({1024}).set_requires_grad(true);
  const testing::CountingAllocator allocator;
  const int64_t before = allocator.live_bytes();
  int64_t live = 0;
  x.register_hook([&](const at::Tensor&) { live = allocator.live_bytes() - before; });
  const auto chain = [](at::Tensor t) {
    for (int i = 0; i < 8; ++i) t = t.tanh();
    return t;
  };
  for (const bool retain_graph : {false, true}) {
    live = 0;
    checkpoint({.preserve_rng_state = false}, chain, x).sum().backward({}, retain_graph);
    EXPECT_GT(live, 0);
    EXPECT_LE(live, 4 * 4 * 1024);  // gradients, and the result
  }
}

// Promise: dropout draws in recomputation what it drew in forward, from torch's generator or one
// that is named, and the generators go on as if nothing had been drawn.
TEST(Checkpoint, RandomNumbersAreThoseOfForward) {
  const at::Tensor x = leaf({64});
  at::Generator own = at::make_generator<at::CPUGeneratorImpl>(3);
  const auto noisy = [&](const at::Tensor& t) {
    const at::Tensor mask = at::empty_like(t).bernoulli_(0.5, own);
    return at::dropout((t * mask).exp(), 0.5, /*train=*/true).sin();
  };
  const auto run = [&](bool checkpointed) {
    torch::manual_seed(5);
    own.set_current_seed(3);
    const auto forward = [&] {
      const at::Tensor y = checkpointed ? checkpoint({.generators = {own}}, noisy, x) : noisy(x);
      return y * at::rand({64}) * at::rand({64}, own);  // draws between forward and backward
    };
    Tensors results = grads_of(forward, {x});
    results.push_back(at::rand({4}));
    results.push_back(at::rand({4}, own));
    return results;
  };
  const Tensors expected = run(false);
  expect_bit_equal(run(true), expected);

  torch::manual_seed(5);
  own.set_current_seed(3);
  const CheckpointOptions careless{.preserve_rng_state = false, .generators = {own}};
  const auto forward = [&] {
    return checkpoint(careless, noisy, x) * at::rand({64}) * at::rand({64}, own);
  };
  EXPECT_FALSE(at::equal(grads_of(forward, {x})[0], expected[0]));
}

// Promise: autocast is in recomputation what it was in forward.
TEST(Checkpoint, AutocastIsThatOfForward) {
  const Net net;
  const at::Tensor x = leaf({kBatch, kDim});
  const auto in_autocast = [&](const std::function<at::Tensor()>& function) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
    at::Tensor y = function();
    at::autocast::decrement_nesting();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    return y.to(at::kFloat);
  };
  const Tensors expected =
      grads_of([&] { return in_autocast([&] { return net(x); }); }, {x, net.up, net.down});
  const auto checkpointed = [&] { return in_autocast([&] { return checkpoint(net, x); }); };
  expect_bit_equal(grads_of(checkpointed, {x, net.up, net.down}), expected);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

// Promise: checkpoints nest, to any depth: the outer one recomputes the inputs of the inner.
TEST(Checkpoint, Nested) {
  const Net net;
  const at::Tensor x = leaf({kBatch, kDim});
  const auto plain = [&](const at::Tensor& t) { return net(net(t).sin()).cos(); };
  const Tensors expected = grads_of([&] { return plain(x); }, {x, net.up, net.down});
  const auto inner = [&](const at::Tensor& t) { return checkpoint(net, t); };
  const auto middle = [&](const at::Tensor& t) { return inner(inner(t).sin()); };
  const auto outer = [&](const at::Tensor& t) { return checkpoint(middle, t).cos(); };
  *net.num_calls = 0;
  expect_bit_equal(grads_of([&] { return checkpoint(outer, x); }, {x, net.up, net.down}), expected);
  // Forward 2. The outer call is run to its end for cos, the middle one up to the inputs of the
  // second net; then each net on its own.
  EXPECT_LE(*net.num_calls, 2 + 2 + 1 + 2 + 1);
}

// Promise: arguments and results may be of all the types that the library looks into, and others.
TEST(Checkpoint, StructuredArgumentsAndResults) {
  const at::Tensor x = leaf({3}, 1), key = leaf({3}, 2), value = leaf({3}, 3);
  const at::Tensor index = at::ones({3}, at::kLong);  // needs no gradient
  const auto function = [](const at::Tensor& t, KeyValue pair, std::vector<at::Tensor> list,
                           std::optional<at::Tensor> none, const char* text, double factor) {
    EXPECT_FALSE(none.has_value());
    EXPECT_EQ(std::string(text), "text");
    at::Tensor sum = t.exp() * pair.key.sin() * *pair.value * pair.scale * factor;
    return std::pair(std::tuple(sum * list[0], list[1]), std::vector<at::Tensor>{t.cos(), t});
  };
  const auto sum_of = [](const auto& result) {
    const auto& [tuple, list] = result;
    return std::get<0>(tuple) + list[0] * list[1] + std::get<1>(tuple);
  };
  const KeyValue pair{.key = key, .value = value, .scale = 3};
  const std::vector<at::Tensor> list{value, index};
  const Tensors expected = grads_of(
      [&] { return sum_of(function(x, pair, list, std::nullopt, "text", 2)); }, {x, key, value});
  const auto checkpointed = [&] {
    return sum_of(checkpoint(function, x, pair, list, std::nullopt, "text", 2));
  };
  expect_bit_equal(grads_of(checkpointed, {x, key, value}), expected);
}

// Promise: a function that returns an argument returns that very tensor; one without tensors among
// its arguments, and one that saves nothing, work too.
TEST(Checkpoint, UnusualFunctions) {
  const at::Tensor x = leaf({3});
  EXPECT_TRUE(checkpoint([](const at::Tensor& t) -> const at::Tensor& { return t; }, x).is_same(x));
  const auto from_outside = [x] { return x.exp(); };
  expect_bit_equal(grads_of([&] { return checkpoint(from_outside); }, {x}),
                   grads_of(from_outside, {x}));
  expect_bit_equal(
      grads_of([&] { return checkpoint([](const at::Tensor& t) { return t + 1; }, x); }, {x}),
      grads_of([&] { return x + 1; }, {x}));
  int sum = 0;
  checkpoint([](int number, int& into) { into += number; }, 3, std::ref(sum));
  EXPECT_EQ(sum, 3);
}

// Promise: inputs that need no gradient, as tokens, do not keep the parameters from theirs.
TEST(Checkpoint, InputsWithoutGradient) {
  const at::Tensor table = leaf({5, kDim}), tokens = at::ones({kBatch}, at::kLong);
  const auto function = [&](const at::Tensor& t) { return at::embedding(table, t).exp(); };
  expect_bit_equal(grads_of([&] { return checkpoint(function, tokens); }, {table}),
                   grads_of([&] { return function(tokens); }, {table}));
}

// Promise: without grad mode it is just the call.
TEST(Checkpoint, DoesNothingWithoutGradMode) {
  const Net net;
  const c10::NoGradGuard no_grad;
  const auto move_only = [token = std::make_unique<int>(1)](const at::Tensor& t) {
    return t.exp();
  };
  EXPECT_FALSE(checkpoint(net, leaf({kBatch, kDim})).requires_grad());
  EXPECT_FALSE((checkpoint(std::cref(move_only), leaf({3})).requires_grad()));
  EXPECT_EQ(*net.num_calls, 1);
}

// Promise: a graph that is kept recomputes in each backward; two forwards before one backward, and
// a result that is never used, do not disturb each other.
TEST(Checkpoint, KeptGraphsAndSeveralForwards) {
  const Net net;
  const at::Tensor x = leaf({kBatch, kDim});
  const auto twice = [](const at::Tensor& y) {
    y.sum().backward({}, /*retain_graph=*/true);
    return y;
  };
  const Tensors expected = grads_of([&] { return twice(net(x)); }, {x, net.up, net.down});
  *net.num_calls = 0;
  expect_bit_equal(grads_of([&] { return twice(checkpoint(net, x)); }, {x, net.up, net.down}),
                   expected);
  EXPECT_EQ(*net.num_calls, 3);

  const auto both = [&](auto&& run) { return run(x) + run(run(x).sin()); };
  const auto run = [&](const at::Tensor& t) {
    const at::Tensor unused = checkpoint(net, t);
    return checkpoint(net, t);
  };
  expect_bit_equal(grads_of([&] { return both(run); }, {x, net.up, net.down}),
                   grads_of([&] { return both(net); }, {x, net.up, net.down}));
}

// Promise: gradients of gradients, gradients inside of the function, and parts of a graph.
TEST(Checkpoint, OtherWaysToDifferentiate) {
  const Net net;
  const at::Tensor x = leaf({kBatch, kDim});
  const auto second_order = [&](const at::Tensor& y) {
    const Tensors grads = torch::autograd::grad({y.sum()}, {x}, {}, {}, /*create_graph=*/true);
    return grads[0].square();
  };
  const Tensors leaves{x, net.up, net.down};
  const Tensors expected = grads_of([&] { return second_order(net(x)); }, leaves);
  const Tensors ours = grads_of([&] { return second_order(checkpoint(net, x)); }, leaves);
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(ours[i].allclose(expected[i])) << i;

  const auto inside = [&](const at::Tensor& t) {
    const at::Tensor y = t.exp();
    return torch::autograd::grad({y.sum()}, {y}, {}, /*retain_graph=*/true)[0] * y.sin() +
           torch::autograd::grad({net(y).sum()}, {y})[0];
  };
  expect_bit_equal(grads_of([&] { return checkpoint(inside, x); }, {x}),
                   grads_of([&] { return inside(x); }, {x}));

  const auto two_parts = [](const at::Tensor& t) { return std::pair(t.exp(), t.sin().exp()); };
  const auto parts = [&](const std::pair<at::Tensor, at::Tensor>& both) {
    both.first.sum().backward({}, /*retain_graph=*/true);
    return both.second;
  };
  expect_bit_equal(grads_of([&] { return parts(checkpoint(two_parts, x)); }, {x}),
                   grads_of([&] { return parts(two_parts(x)); }, {x}));
}

struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x, x * x});
    return x * x;
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors grads) {
    EXPECT_EQ(context->get_saved_variables().size(), 2);  // asks twice
    return {grads[0] * 2 * context->get_saved_variables()[0]};
  }
};

// Promise: a Function of the user's may ask for what it saved as often as it wants.
TEST(Checkpoint, CustomFunctions) {
  const at::Tensor x = leaf({3});
  const auto function = [](const at::Tensor& t) { return Square::apply(t.exp()).sin(); };
  expect_bit_equal(grads_of([&] { return checkpoint(function, x); }, {x}),
                   grads_of([&] { return function(x); }, {x}));
}

// Promise: as in PyTorch, what the function does besides computing happens in recomputation again.
TEST(Checkpoint, BuffersChangeAgain) {
  torch::nn::BatchNorm1d norm(kDim);
  checkpoint([norm](const at::Tensor& t) mutable { return norm(t); }, leaf({kBatch, kDim}))
      .sum()
      .backward();
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 2);
}

// Promise: if recomputation does not save what forward would have, the error says what differs.
TEST(Checkpoint, ErrorsNameWhatDiffers) {
  int call = 0;
  const auto other_shape = [&](const at::Tensor& t) {
    return t.exp().narrow(0, 0, 3 - call++).exp();
  };
  const at::Tensor x = leaf({3});
  expect_message<StateError>([&] { checkpoint(other_shape, x).sum().backward(); },
                             "saved tensor 2 of 2 had shape [3], Float, cpu in forward, and has "
                             "shape [2], Float, cpu when computed again");
  call = 0;
  const auto other_dtype = [&](const at::Tensor& t) {
    return t.to(call++ == 0 ? at::kFloat : at::kDouble).exp();
  };
  expect_message<StateError>([&] { checkpoint(other_dtype, x).sum().backward(); },
                             "has shape [3], Double, cpu when computed again");
  call = 0;
  CheckpointOptions unchecked{.determinism_check = DeterminismCheck::kNone};
  checkpoint(unchecked, other_dtype, x).sum().backward();

  call = 0;
  const auto fewer = [&](const at::Tensor& t) { return call++ == 0 ? t.exp().sin() : t.exp(); };
  expect_message<StateError>([&] { checkpoint(fewer, x).sum().backward(); },
                             "autograd saved 2 tensors in forward of ");
  call = 0;
  const auto more = [&](const at::Tensor& t) { return call++ == 0 ? t.exp() : t.exp().sin(); };
  expect_message<StateError>(
      [&] { checkpoint({.early_stop = false}, more, x).sum().backward(); },
      ", and 2 when it was computed again. The function must compute the same");
}

// Promise: what the function throws in recomputation goes through backward as it is, and leaves
// the thread as it was: the next backward is right.
TEST(Checkpoint, ExceptionsInRecomputation) {
  struct Mine : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const at::Tensor x = leaf({3});
  bool throws = false;
  const auto function = [&](const at::Tensor& t) {
    const at::Tensor y = t.exp();
    if (throws) throw Mine("mine");
    return y.sin();
  };
  at::Tensor y = checkpoint(function, x);
  throws = true;
  EXPECT_THROW(y.sum().backward({}, /*retain_graph=*/true), Mine);
  EXPECT_THROW(checkpoint(function, x), Mine);
  throws = false;
  EXPECT_TRUE(c10::GradMode::is_enabled());
  expect_bit_equal(grads_of([&] { return y; }, {x}), grads_of([&] { return function(x); }, {x}));
}

// Promise: edits in place that would falsify gradients are errors, as without checkpoint().
TEST(Checkpoint, EditsInPlace) {
  const at::Tensor x = leaf({3});
  at::Tensor input = x * 2;
  const at::Tensor y = checkpoint([](const at::Tensor& t) { return t.exp(); }, input);
  input.add_(1);
  expect_message<c10::Error>([&] { y.sum().backward(); }, "modified by an inplace operation");

  const auto edits = [](const at::Tensor& t) {
    at::Tensor saved = t.exp();
    saved.add_(1);
    return saved.sin();
  };
  expect_message<StateError>([&] { checkpoint(edits, x).sum().backward(); },
                             "saved tensor 1 of 2 (shape [3], Float, cpu)");
}

// Promise: each thread has its own checkpoints; nothing crosses over.
TEST(Checkpoint, ManyThreads) {
  std::atomic<int> num_right = 0;
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    threads.emplace_back([&num_right, seed] {
      const Net net;
      const at::Tensor x = leaf({kBatch, kDim}, seed);
      const Tensors leaves{x, net.up, net.down};
      for (int i = 0; i < 20; ++i) {
        const Tensors expected = grads_of([&] { return net(x); }, leaves);
        const Tensors ours = grads_of([&] { return checkpoint(net, x); }, leaves);
        num_right += std::equal(ours.begin(), ours.end(), expected.begin(),
                                [](auto& a, auto& b) { return at::equal(a, b); });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_right, 8 * 20);
}

// Promise: a module that was given to checkpoint() recomputes in each forward, by any way of
// calling it, as does a holder that is the function.
TEST(CheckpointModule, GradientsAreBitEqual) {
  testing::MLP mlp(kDim);
  const at::Tensor x = leaf({kBatch, kDim});
  Tensors leaves = mlp->parameters();
  leaves.push_back(x);
  const Tensors expected = grads_of([&] { return mlp(x); }, leaves);
  expect_bit_equal(grads_of([&] { return checkpoint(mlp, x); }, leaves), expected);
  checkpoint(*mlp, {.preserve_rng_state = false});
  testing::CountingAllocator allocator;
  const int64_t before = allocator.live_bytes();
  at::Tensor y = mlp(x);
  EXPECT_EQ(allocator.live_bytes() - before, 4 * kBatch * kDim);
  y.reset();
  expect_bit_equal(grads_of([&] { return mlp(x); }, leaves), expected);
  expect_bit_equal(grads_of([&] { return torch::nn::Sequential(mlp)->forward(x); }, leaves),
                   expected);
}

// Promise: a clone is checkpointed as its original is.
TEST(CheckpointModule, Clones) {
  fsdp::nn::Linear linear(2, 2);
  checkpoint(*linear);
  const auto copy = std::dynamic_pointer_cast<FSDPModule>(linear->clone());
  EXPECT_EQ(copy->activation_checkpoint(), linear->activation_checkpoint());
}

struct TakesPointerImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, std::unique_ptr<int> number) { return x * *number; }
};
FSDP_MODULE(TakesPointer);

// Promise: mistakes are told.
TEST(CheckpointModule, Errors) {
  torch::nn::Linear plain(2, 2);
  expect_message<ConfigError>([&] { checkpoint(*plain); }, "LinearImpl runs no hooks");
  testing::MLP mlp(kDim);
  checkpoint(*mlp);
  expect_message<ConfigError>([&] { checkpoint(*mlp); }, "has been given to checkpoint() before");
  TakesPointer module;
  EXPECT_EQ(module(at::ones({1}), std::make_unique<int>(2)).item<float>(), 2);
  checkpoint(*module);
  expect_message<ConfigError>([&] { module(at::ones({1}), std::make_unique<int>(2)); },
                              "again in backward: it, or one of its arguments, cannot be copied");
}

}  // namespace
}  // namespace fsdp
