// Hooks run around every way to call a forward of every signature. A hook that is skipped often
// gives right numbers all the same, so these tests count events; and hooks multiply tensors, so
// that the values show that what a hook replaced is what forward, or the caller, got.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include "fsdp/error.h"
#include "fsdp/module.h"
#include "module/recording_hooks.h"

using at::Tensor;

namespace {

struct Cache {
  Tensor key, value;
  int length = 0;
};

}  // namespace

template <>
struct fsdp::TensorTraits<Cache> : fsdp::TensorFields<&Cache::key, &Cache::value> {};

namespace fsdp {
namespace {

using testing::calls;
using testing::HookEvents;
using testing::record;
using torch::nn::AnyModule;
using torch::nn::AnyValue;

Tensor number(double value) { return at::full({1}, value); }
double value_of(const Tensor& tensor) { return tensor.item<double>(); }

// ---- Signatures

struct ByValueImpl : torch::nn::Module {
  Tensor forward(Tensor x) { return x + 1; }
};
FSDP_MODULE(ByValue);

struct ByConstReferenceImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return x + 1; }
};
FSDP_MODULE(ByConstReference);

struct ByRvalueImpl : torch::nn::Module {
  Tensor forward(Tensor&& x) { return std::move(x) + 1; }
};
FSDP_MODULE(ByRvalue);

struct ConstImpl : torch::nn::Module {
  Tensor forward(Tensor x) const { return x + 1; }
};
FSDP_MODULE(Const);

struct NoexceptImpl : torch::nn::Module {
  Tensor forward(Tensor x) noexcept { return x + 1; }
};
FSDP_MODULE(Noexcept);

struct ConstNoexceptImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) const noexcept { return x + 1; }
};
FSDP_MODULE(ConstNoexcept);

struct VirtualImpl : torch::nn::Module {
  virtual Tensor forward(Tensor x) { return x + 1; }
};
FSDP_MODULE(Virtual);

// Promise: one tensor in, one out, one call: whichever way forward is declared and called. Hooks
// double what goes in and multiply what comes out by ten: (2 * 1 + 1) * 10.
template <class Holder>
void expect_hooked_calls() {
  Holder block;
  const Tensor x = number(1);
  EXPECT_EQ(value_of(block(number(1))), 2) << "without hooks";
  const auto hooks = record(block);
  hooks->input_factor = 2;
  hooks->output_factor = 10;

  EXPECT_EQ(value_of(block(x.clone())), 30);
  EXPECT_EQ(value_of(block->forward(x.clone())), 30);
  EXPECT_EQ(value_of((*block).forward(x.clone())), 30);
  EXPECT_EQ(hooks->take(), calls(3, 1, 1));
  if constexpr (!std::is_same_v<Holder, ByRvalue>) {
    Tensor lvalue = number(1);
    EXPECT_EQ(value_of(block(x)), 30) << "a const lvalue";
    EXPECT_EQ(value_of(block->forward(lvalue)), 30);
    EXPECT_EQ(value_of(lvalue), 1) << "the caller's tensor was replaced";
    EXPECT_EQ(hooks->take(), calls(2, 1, 1));
  }
  torch::nn::Module& module = *block;
  EXPECT_EQ(value_of(module.as<Holder>()->forward(x.clone())), 30) << "through as<>";
  EXPECT_EQ(hooks->take(), calls(1, 1, 1));
}

TEST(ForwardHooksTest, RunForEveryWayToDeclareAForward) {
  expect_hooked_calls<ByValue>();
  expect_hooked_calls<ByConstReference>();
  expect_hooked_calls<ByRvalue>();
  expect_hooked_calls<Const>();
  expect_hooked_calls<Noexcept>();
  expect_hooked_calls<ConstNoexcept>();
  expect_hooked_calls<Virtual>();
}

TEST(ForwardHooksTest, RunOnAConstModule) {
  const Const block;
  const auto hooks = record(const_cast<Const&>(block));
  EXPECT_EQ(value_of(block->forward(number(1))), 2);
  EXPECT_EQ(hooks->take(), calls(1, 1, 1));
}

TEST(ForwardHooksTest, RunInAnyModuleAndSequential) {
  ByValue first;
  ByConstReference second;
  Noexcept third;
  const auto hooks = record(first);
  second->set_forward_hooks(hooks);
  third->set_forward_hooks(hooks);
  EXPECT_EQ(value_of(AnyModule(first).forward(number(1))), 2);
  EXPECT_EQ(value_of(torch::nn::Sequential(first, second, third)->forward(number(1))), 4);
  EXPECT_EQ(hooks->take(), calls(4, 1, 1));
}

// ---- Default arguments, overloads, templates

struct MaskedImpl : torch::nn::Module {
  Tensor forward(Tensor x, std::optional<Tensor> mask = std::nullopt, bool negate = false) {
    const Tensor masked = mask ? x + *mask : x;
    return negate ? -masked : masked;
  }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, AnyValue(std::optional<Tensor>())}, {2, AnyValue(false)})
};
FSDP_MODULE(Masked);

TEST(ForwardHooksTest, LeaveDefaultArgumentsAsTheyWere) {
  Masked block;
  const auto hooks = record(block);
  hooks->input_factor = 2;
  const Tensor x = number(1);
  torch::nn::Module& module = *block;

  EXPECT_EQ(value_of(block(x)), 2);
  EXPECT_EQ(value_of(block->forward(x)), 2);
  EXPECT_EQ(value_of(module.as<Masked>()->forward(x)), 2);
  EXPECT_EQ(value_of(AnyModule(block).forward(x)), 2);
  EXPECT_EQ(value_of(torch::nn::Sequential(block)->forward(x)), 2);
  EXPECT_EQ(value_of(block->forward(x, {}, true)), -2) << "braces where every argument is given";
  EXPECT_EQ(hooks->take(), calls(6, 1, 1));

  EXPECT_EQ(value_of(block(x, x)), 4) << "a Tensor where an optional is taken";
  EXPECT_EQ(value_of(block->forward(x, std::optional(x), true)), -4);
  EXPECT_EQ(value_of(AnyModule(block).forward(x, std::optional(x))), 4);
  EXPECT_EQ(hooks->take(), calls(3, 2, 1));
}

struct OverloadedImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return x + 1; }
  std::pair<Tensor, Tensor> forward(const Tensor& x, const Tensor& y) { return {y, x}; }
  int forward(int x) { return x + 1; }
};
FSDP_MODULE(Overloaded);

struct TemplateImpl : torch::nn::Module {
  template <class T>
  std::vector<T> forward(T x) {
    return {x, x};
  }
};
FSDP_MODULE(Template);

TEST(ForwardHooksTest, RunForOverloadsAndTemplates) {
  Overloaded block;
  auto hooks = record(block);
  hooks->input_factor = 2;
  EXPECT_EQ(value_of(block(number(1))), 3);
  EXPECT_EQ(hooks->take(), calls(1, 1, 1));
  EXPECT_EQ(value_of(block->forward(number(1), number(3)).first), 6);
  EXPECT_EQ(hooks->take(), calls(1, 2, 2));
  EXPECT_EQ(block(1), 2);
  EXPECT_EQ(hooks->take(), calls(1, 0, 0));

  Template generic;
  hooks = record(generic);
  hooks->input_factor = 2;
  EXPECT_EQ(value_of(generic(number(1)).at(1)), 2);
  EXPECT_EQ(hooks->take(), calls(1, 1, 2));
  EXPECT_EQ(generic->forward(3), std::vector<int>({3, 3}));
  EXPECT_EQ(hooks->take(), calls(1, 0, 0));
}

// ---- What arguments and results are made of

using NestedResult = std::tuple<Tensor, std::optional<Tensor>, std::vector<std::pair<Tensor, int>>>;

struct NestedImpl : torch::nn::Module {
  NestedResult forward(const std::tuple<Tensor, std::pair<Tensor, int>>& tuple,
                       const std::vector<Tensor>& list, std::map<std::string, Tensor> by_name,
                       const std::string& name) {
    return {std::get<0>(tuple) + std::get<1>(tuple).first,
            std::nullopt,
            {{list.at(1), 7}, {by_name.at(name), 8}}};
  }
};
FSDP_MODULE(Nested);

TEST(ForwardHooksTest, ReplaceTensorsInNestedArgumentsAndResults) {
  Nested block;
  const auto hooks = record(block);
  hooks->input_factor = 2;
  hooks->output_factor = 10;
  const std::vector<Tensor> list{number(3), number(4), Tensor()};
  const auto [sum, none, pairs] =
      block(std::tuple(number(1), std::pair(number(2), 0)), list,
            std::map<std::string, Tensor>{{"five", number(5)}, {"six", number(6)}}, "six");
  EXPECT_EQ(hooks->take(), (HookEvents{1, 1, 0, /*num_inputs=*/6, /*num_outputs=*/3}));
  EXPECT_EQ(value_of(sum), 60);
  EXPECT_FALSE(none.has_value());
  EXPECT_EQ(value_of(pairs.at(0).first), 80);
  EXPECT_EQ(value_of(pairs.at(1).first), 120);
  EXPECT_EQ(value_of(list[1]), 4) << "the caller's list was changed";

  block->forward({number(1), {number(2), 0}}, {number(3), number(4)}, {{"a", number(5)}}, "a");
  EXPECT_EQ(hooks->take(), (HookEvents{1, 1, 0, 5, 3})) << "with braces";
}

struct WithCacheImpl : torch::nn::Module {
  Cache forward(const Tensor& x, Cache cache) {
    return {cache.key + x, std::move(cache.value), cache.length + 1};
  }
};
FSDP_MODULE(WithCache);

TEST(ForwardHooksTest, ReplaceTensorsInAClassMadeKnown) {
  WithCache block;
  const auto hooks = record(block);
  hooks->input_factor = 2;
  const Cache cache = block(number(1), Cache{number(2), Tensor(), 3});
  EXPECT_EQ(hooks->take(), (HookEvents{1, 1, 0, /*num_inputs=*/2, /*num_outputs=*/1}));
  EXPECT_EQ(value_of(cache.key), 6);
  EXPECT_EQ(cache.length, 4);
  EXPECT_EQ(value_of(block->forward(number(1), {number(2), number(3)}).value), 6);
  EXPECT_EQ(hooks->take(), (HookEvents{1, 1, 0, 3, 2})) << "with braces";
}

// Promise: references in a tuple of std::tie() are seen, and what they refer to is not replaced.
struct TieImpl : torch::nn::Module {
  std::tuple<const Tensor&, const Tensor&> forward(std::tuple<Tensor, Tensor> pair) {
    first = std::get<0>(pair), second = std::get<1>(pair);
    return std::tie(first, second);
  }
  Tensor first, second;
};
FSDP_MODULE(Tie);

TEST(ForwardHooksTest, SeeTheTensorsOfATie) {
  Tie block;
  const auto hooks = record(block);
  hooks->input_factor = 2;
  hooks->output_factor = 10;
  Tensor a = number(1), b = number(2);
  const std::tuple<Tensor, Tensor> result = block(std::tie(a, b));
  EXPECT_EQ(hooks->take(), calls(1, 2, 2));
  EXPECT_EQ(value_of(std::get<1>(result)), 40);
  EXPECT_EQ(value_of(b), 2);
  EXPECT_EQ(value_of(block->second), 4) << "a member was replaced";
}

struct MoveOnlyImpl : torch::nn::Module {
  std::unique_ptr<int> forward(std::unique_ptr<int> pointer, const Tensor& x) {
    *pointer += x.item<int>();
    return pointer;
  }
};
FSDP_MODULE(MoveOnly);

struct MoveOnlyWithTensorImpl : torch::nn::Module {
  using Pair = std::pair<Tensor, std::unique_ptr<int>>;
  Pair forward(Pair pair) { return pair; }
};
FSDP_MODULE(MoveOnlyWithTensor);

TEST(ForwardHooksTest, PassMoveOnlyArgumentsAndResults) {
  MoveOnly block;
  auto hooks = record(block);
  hooks->input_factor = 2;
  EXPECT_EQ(*block(std::make_unique<int>(1), number(3)), 7);
  EXPECT_EQ(*block->forward(std::make_unique<int>(1), number(3)), 7);
  EXPECT_EQ(hooks->take(), calls(2, 1, 0));

  MoveOnlyWithTensor pairs;
  hooks = record(pairs);
  EXPECT_EQ(*pairs->forward({number(1), std::make_unique<int>(5)}).second, 5);
  EXPECT_EQ(hooks->take(), calls(1, 1, 1));
}

// Promise: what holds no tensors is forwarded as it is: references stay references.
struct CountingImpl : torch::nn::Module {
  void forward(const Tensor& x, std::vector<double>& seen) { seen.push_back(value_of(x)); }
};
FSDP_MODULE(Counting);

struct ByReferenceImpl : torch::nn::Module {
  std::string& forward(std::string& text, Tensor* slot) {
    *slot = number(9);
    return text += "!";
  }
};
FSDP_MODULE(ByReference);

TEST(ForwardHooksTest, LeaveOtherArgumentsUntouched) {
  Counting block;
  auto hooks = record(block);
  hooks->input_factor = 2;
  std::vector<double> seen;
  block(number(1), seen);
  block->forward(number(2), seen);
  EXPECT_EQ(seen, std::vector<double>({2, 4}));
  EXPECT_EQ(hooks->take(), calls(2, 1, 0)) << "post_forward runs for void, too";

  ByReference other;
  hooks = record(other);
  std::string text = "a";
  Tensor slot;
  EXPECT_EQ(&other(text, &slot), &text);
  EXPECT_EQ(text, "a!");
  EXPECT_EQ(value_of(slot), 9);
  EXPECT_EQ(hooks->take(), calls(1, 0, 0));
}

// Promise: a reference to tensors becomes a value, for forward had its own copy of the argument.
struct SameImpl : torch::nn::Module {
  const Tensor& forward(const Tensor& x) { return x; }
};
FSDP_MODULE(Same);

TEST(ForwardHooksTest, ReturnReferencesToTensorsAsValues) {
  static_assert(std::is_same_v<decltype(std::declval<Same&>()(number(1))), Tensor>);
  Same block;
  const auto hooks = record(block);
  hooks->output_factor = 10;
  const Tensor x = number(1);
  EXPECT_EQ(value_of(block(x)), 10);
  EXPECT_EQ(value_of(AnyModule(block).forward(x)), 10);
  EXPECT_EQ(value_of(x), 1);
  EXPECT_EQ(hooks->take(), calls(2, 1, 1));
}

struct InPlaceImpl : torch::nn::Module {
  void forward(Tensor x) { x.add_(1); }
};
FSDP_MODULE(InPlace);

TEST(ForwardHooksTest, LetTheCallerSeeEditsInPlace) {
  InPlace block;
  record(block);
  const Tensor x = number(1);
  block(x);
  EXPECT_EQ(value_of(x), 2);
}

// ---- Errors

struct ThrowingImpl : torch::nn::Module {
  Tensor forward(const Tensor& x, int what) {
    if (what == 1) throw std::out_of_range("forward");
    if (what == 2) throw 2;
    return x;
  }
};
FSDP_MODULE(Throwing);

TEST(ForwardHooksTest, AreToldOnceWhenForwardThrows) {
  Throwing block;
  const auto hooks = record(block);
  const HookEvents threw{1, 0, 1, 1, 0};
  EXPECT_THROW(block(number(1), 1), std::out_of_range);
  EXPECT_EQ(hooks->take(), threw);
  EXPECT_THROW(block->forward(number(1), 1), std::out_of_range);
  EXPECT_EQ(hooks->take(), threw);
  EXPECT_THROW(block(number(1), 2), int) << "not derived from std::exception";
  EXPECT_EQ(hooks->take(), threw);
  block(number(1), 0);
  EXPECT_EQ(hooks->take(), calls(1, 1, 1)) << "the next call is as any";
}

class ThrowingHooks : public testing::RecordingHooks {
 public:
  bool in_pre = false;
  void pre_forward(torch::nn::Module& module, TensorRefs& inputs) override {
    RecordingHooks::pre_forward(module, inputs);
    if (in_pre) throw std::runtime_error("pre_forward");
  }
  void post_forward(torch::nn::Module& module, TensorRefs& outputs) override {
    RecordingHooks::post_forward(module, outputs);
    throw std::runtime_error("post_forward");
  }
};

// Promise: whichever of them throws, what pre_forward began is ended.
TEST(ForwardHooksTest, AreToldWhenPreForwardOrPostForwardThrows) {
  ByValue block;
  const auto hooks = std::make_shared<ThrowingHooks>();
  block->set_forward_hooks(hooks);
  EXPECT_THROW(block(number(1)), std::runtime_error);
  EXPECT_EQ(hooks->take(), (HookEvents{1, 1, 1, 1, 1}));
  hooks->in_pre = true;
  EXPECT_THROW(block(number(1)), std::runtime_error);
  EXPECT_EQ(hooks->take(), (HookEvents{1, 0, 1, 1, 0}));
}

// ---- Calls within calls

struct AgainImpl : torch::nn::Module {
  Tensor forward(const Tensor& x, int depth) { return depth == 0 ? x : again(x + 1, depth - 1); }
  std::function<Tensor(const Tensor&, int)> again;
};
FSDP_MODULE(Again);

TEST(ForwardHooksTest, RunForACallWithinACall) {
  Again block;
  const auto hooks = record(block);
  block->again = [&block](const Tensor& x, int depth) { return block(x, depth); };
  EXPECT_EQ(value_of(block(number(1), 3)), 4);
  EXPECT_EQ(hooks->take(), calls(4, 1, 1));
}

struct ParentImpl : torch::nn::Module {
  ParentImpl() { child = register_module("child", ByValue()); }
  Tensor forward(const Tensor& x) { return child(x) + child->forward(x); }
  ByValue child{nullptr};
};
FSDP_MODULE(Parent);

TEST(ForwardHooksTest, RunForChildrenInsideOfTheirParent) {
  Parent block;
  const auto hooks = record(block);
  block->child->set_forward_hooks(hooks);
  EXPECT_EQ(value_of(block(number(1))), 4);
  EXPECT_EQ(hooks->take(), calls(3, 1, 1));
  const std::vector<torch::nn::Module*> order{block.get(), block->child.get(), block->child.get()};
  EXPECT_EQ(hooks->modules, order);
}

TEST(ForwardHooksTest, EndTheCallWithTheHooksItBeganWith) {
  Again block;
  const auto hooks = record(block);
  block->again = [&block](const Tensor& x, int) {
    block->set_forward_hooks(nullptr);
    return x;
  };
  block(number(1), 1);
  EXPECT_EQ(hooks->take(), calls(1, 1, 1));
  block(number(1), 0);
  EXPECT_EQ(hooks->take(), calls(0, 0, 0));
}

struct GeneratorImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return x; }
  Tensor generate(const Tensor& x, int steps) { return x + steps; }
};
FSDP_MODULE(Generator);

TEST(ForwardHooksTest, RunForAnotherMethodCalledAsForward) {
  Generator block;
  EXPECT_EQ(value_of(call_as_forward(*block, &GeneratorImpl::generate, block.get(), number(1), 2)),
            3);
  const auto hooks = record(block);
  hooks->input_factor = 2;
  EXPECT_EQ(value_of(call_as_forward(*block, &GeneratorImpl::generate, block.get(), number(1), 2)),
            4);
  EXPECT_EQ(hooks->take(), calls(1, 1, 1));
}

// ---- [Note: limits of a hooked forward], one by one

struct RebindingImpl : torch::nn::Module {
  Tensor forward(Tensor& x) { return x = x + 1; }
};

TEST(ForwardHooksLimitsTest, ANonConstReferenceToTensorsIsRefused) {
  // The condition of the static_assert that refuses it, which cannot be compiled here.
  static_assert(std::is_invocable_v<PlainForward<RebindingImpl>, Tensor&>);
  static_assert(!std::is_invocable_v<PlainForward<RebindingImpl>, PassedArgument<Tensor&>>);
  static_assert(std::is_invocable_v<PlainForward<ByValueImpl>, PassedArgument<Tensor&>>);
}

template <class M>
concept TakesABraceBeforeADefault = requires(M& module, Tensor x) {
  module.forward(x, {});
};

TEST(ForwardHooksLimitsTest, ABraceBeforeArgumentsLeftOutDoesNotCompile) {
  static_assert(TakesABraceBeforeADefault<MaskedImpl>);
  static_assert(!TakesABraceBeforeADefault<Masked::Impl>);
}

TEST(ForwardHooksLimitsTest, AHookedForwardIsNeverNoexcept) {
  static_assert(noexcept(std::declval<NoexceptImpl&>().forward(std::declval<Tensor>())));
  static_assert(!noexcept(std::declval<Noexcept::Impl&>().forward(std::declval<Tensor>())));
}

TEST(ForwardHooksLimitsTest, ACallThroughTheBaseClassRunsNoHooksUnlessItIsVirtual) {
  ByValue block;
  const auto hooks = record(block);
  ByValueImpl* const plain = block.get();
  EXPECT_EQ(value_of(plain->forward(number(1))), 2);
  EXPECT_EQ(hooks->take(), calls(0, 0, 0));

  Virtual block_with_virtual_forward;
  block_with_virtual_forward->set_forward_hooks(hooks);
  VirtualImpl* const base = block_with_virtual_forward.get();
  EXPECT_EQ(value_of(base->forward(number(1))), 2);
  EXPECT_EQ(hooks->take(), calls(1, 1, 1));
}

struct Unknown {
  Tensor tensor;
};
struct UnknownArgumentImpl : torch::nn::Module {
  Tensor forward(const Unknown& argument) { return argument.tensor + 1; }
};
FSDP_MODULE(UnknownArgument);

TEST(ForwardHooksLimitsTest, TensorsInAClassNotMadeKnownAreNotSeen) {
  UnknownArgument block;
  const auto hooks = record(block);
  hooks->input_factor = 2;
  EXPECT_EQ(value_of(block(Unknown{number(1)})), 2);
  EXPECT_EQ(hooks->take(), calls(1, 0, 1));
}

}  // namespace
}  // namespace fsdp
