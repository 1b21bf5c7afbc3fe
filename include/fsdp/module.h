#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "fsdp/activation.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"
#include "fsdp/pytree.h"

/// FSDP_MODULE(Block); stands where TORCH_MODULE(Block); stood, after the definition of BlockImpl.
///
/// It makes `Block` a holder of Hooked<BlockImpl>: a BlockImpl and an FSDPModule in one, around
/// whose forward fully_shard() can run code. The rest is as TORCH_MODULE has it: construction,
/// register_module, as<Block>(), Sequential, AnyModule, ModuleList, clone, printing, torch::save.
/// `Block::Impl` is Hooked<BlockImpl>.
///
/// Hooks run for `block(x)`, `block->forward(x)`, and where AnyModule or Sequential call. They do
/// not run for a call through a BlockImpl* or in a std::make_shared<BlockImpl>(): its forward is
/// not virtual, so C++ gives no place to stand there.
///
/// [Note: limits of a hooked forward]
///  - Forward gets a copy of each tensor handle, so that hooks may replace it. What it assigned
///    to a `Tensor&` parameter would be lost: such a forward does not compile. Return the tensor,
///    or take a pointer. Edits in place (`x.add_(1)`) are seen as ever; of an
///    input that requires grad of a sharded module they are autograd's error, as in FSDP2.
///  - A result that refers to tensors (`const Tensor&`, std::tie) is returned as a value.
///  - `block->forward(x, {})` does not compile if more arguments follow that are left out: a brace
///    has no type to deduce. Name it, `Tensor()`, or give all arguments.
///  - A hooked forward is never noexcept. AnyModule takes no const forward, as in libtorch.
///  - `any_module.get<Block>()` does not compile if forward has default arguments; say
///    `any_module.ptr()->as<Block>()`.
///  - Tensors are found in the types that pytree.h knows, and in no others.
///  - BlockImpl has to be complete here, and must not derive from a hooked type itself.
#define FSDP_MODULE(Name) FSDP_MODULE_IMPL(Name, Name##Impl)

/// FSDP_MODULE for an implementation class of another name.
#define FSDP_MODULE_IMPL(Name, ImplType)                    \
  class Name : public ::fsdp::HookedHolder<ImplType> {      \
   public:                                                  \
    using ::fsdp::HookedHolder<ImplType>::HookedHolder;     \
    using Impl [[maybe_unused]] = ::fsdp::Hooked<ImplType>; \
  }

namespace fsdp {

/// What an argument of type A&& becomes on its way into a hooked forward: tensors a value of our
/// own, which hooks may rewrite; everything else untouched, so that it need not be copyable.
template <class A, bool = contains_tensors<A>>
struct ForwardArgument {
  using Passed = A&&;
  A&& value;

  Passed pass() { return static_cast<Passed>(value); }
  void collect(TensorRefs&) {}
};
template <class A>
struct ForwardArgument<A, true> {
  using Owned = OwnedTensorsOf<A>;
  using Passed = std::conditional_t<std::is_lvalue_reference_v<A>, const Owned&, Owned&&>;
  Owned value;

  Passed pass() { return static_cast<Passed>(value); }
  void collect(TensorRefs& refs) { collect_tensors(value, refs); }
};
template <class A>
using PassedArgument = typename ForwardArgument<A>::Passed;

/// What a forward that returns an R returns when hooked. A reference may be to an argument, of
/// which forward had a copy, or to tensors that hooks replace: it becomes a value.
template <class R>
using HookedResult =
    std::conditional_t<std::is_void_v<R> ||
                           (std::is_lvalue_reference_v<R> && !contains_tensors<R> &&
                            !std::is_const_v<std::remove_reference_t<R>>),
                       R, OwnedTensorsOf<R>>;

template <class Function>
struct ForwardAgain;

/// Calls `function(args...)` with the hooks of `module` around it, if it has any, and inside of
/// them as a checkpoint, if there are options for one.
template <class Function, class... A>
auto call_with_hooks(FSDPModule& module, const CheckpointOptions* checkpoint, Function& function,
                     A&&... args) -> HookedResult<std::invoke_result_t<Function&, A...>> {
  using Result = HookedResult<std::invoke_result_t<Function&, A...>>;
  const std::shared_ptr<ForwardHooks> hooks = module.forward_hooks();  // forward may set others
  torch::nn::Module& as_module = module.as_module();
  std::tuple<ForwardArgument<A>...> arguments{ForwardArgument<A>{std::forward<A>(args)}...};
  const auto forward = [&](auto&... argument) -> Result {
    TensorRefs inputs, outputs;
    (argument.collect(inputs), ...);
    if (hooks) hooks->pre_forward(as_module, inputs);
    std::optional<CheckpointScope> scope;
    if (checkpoint != nullptr && c10::GradMode::is_enabled()) {
      using Again =
          ForwardAgain<std::conditional_t<std::is_function_v<Function>, Function*, Function>>;
      if constexpr (!std::is_copy_constructible_v<Again>) {
        throw_not_repeatable(typeid(Function));
      } else {
        const Again again{&module, as_module.weak_from_this().lock(), function};
        scope.emplace(
            *checkpoint, repeatable_call<Again, PassedArgument<A>...>(again, argument.value...),
            typeid(Function), !std::is_nothrow_invocable_v<Function&, PassedArgument<A>...>);
      }
    }
    if constexpr (std::is_void_v<Result>) {
      std::invoke(function, argument.pass()...);
      scope.reset();
      if (hooks) hooks->post_forward(as_module, outputs);
    } else {
      Result result = std::invoke(function, argument.pass()...);
      scope.reset();
      collect_tensors(result, outputs);
      if (hooks) hooks->post_forward(as_module, outputs);
      return result;
    }
  };
  try {
    return std::apply(forward, arguments);
  } catch (...) {  // also what is no std::exception: how a recomputation stops early
    if (hooks) hooks->forward_threw(as_module);
    throw;
  }
}

/// A checkpointed forward, to be computed again: with the hooks, and no checkpoint. Keeps the
/// module alive.
template <class Function>
struct ForwardAgain {
  FSDPModule* module;
  std::shared_ptr<torch::nn::Module> owner;
  Function function;

  template <class... A>
  void operator()(A&&... args) {
    call_with_hooks(*module, /*checkpoint=*/nullptr, function, std::forward<A>(args)...);
  }
};

/// Calls `function(args...)` as a forward of `module`, with the hooks around it. For methods other
/// than forward: `call_as_forward(*block, &BlockImpl::generate, block.get(), x)`.
///
/// Without hooks it costs two pointer tests. If function, or a hook before it, throws,
/// forward_threw() is called in place of post_forward() and the exception goes on. A module that
/// was given to checkpoint() saves nothing inside of the hooks, and runs them again in backward.
/// Source: PyTorch 2.13, torch.distributed.fsdp.register_fsdp_forward_method.
template <class Function, class... A>
auto call_as_forward(FSDPModule& module, Function&& function, A&&... args)
    -> HookedResult<std::invoke_result_t<Function&, A...>> {
  static_assert(std::is_invocable_v<Function&, PassedArgument<A>...>,
                "fsdp: a hooked forward cannot take a non-const reference to tensors: what it "
                "assigned would be lost. Take Tensor or const Tensor& and return the result, or "
                "take Tensor*.");
  const std::shared_ptr<const CheckpointOptions> checkpoint = module.activation_checkpoint();
  if (module.forward_hooks() == nullptr && checkpoint == nullptr) {
    return std::invoke(function, std::forward<A>(args)...);
  }
  return call_with_hooks(module, checkpoint.get(), function, std::forward<A>(args)...);
}

/// Whether M has a forward that takes these arguments.
template <class M, class... A>
concept ForwardTakes = requires(M& module, A&&... args) {
  module.forward(std::forward<A>(args)...);
};

/// Calls M::forward. Qualified: a virtual forward would come back to the hooked one, for ever.
template <class M>
struct PlainForward {
  M* module;

  template <class... A>
  requires ForwardTakes<M, A...>
  decltype(auto) operator()(A&&... args) const
      noexcept(noexcept(module->M::forward(std::forward<A>(args)...))) {
    return module->M::forward(std::forward<A>(args)...);
  }
};

template <class M>
class Hooked;

/// An M that is an FSDPModule, and can call its forward with the hooks around it.
template <class M>
class HookedModule : public M, public FSDPModule {
  static_assert(std::is_base_of_v<torch::nn::Module, M>,
                "FSDP_MODULE: the implementation class does not derive from torch::nn::Module");
  static_assert(!std::is_base_of_v<FSDPModule, M>,
                "FSDP_MODULE: the implementation class is hooked already; derive it from the Impl "
                "class that you wrote, not from Hooked<Impl>");

  struct FromCopy {};

 public:
  using M::M;
  HookedModule() = default;
  HookedModule(FromCopy, M&& copy) : M(std::move(copy)) {}

  /// A deep copy that is hooked as this one is, as are those of its children that are hooked.
  ///
  /// Errors:  StateError if it or a module below it is sharded; ConfigError if M's clone() makes
  ///          something else than an M.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

  /// Converts as M does; sharded parameters stay sharded parameters.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override {
    M::to(device, dtype, non_blocking);
    if (forward_hooks() != nullptr) forward_hooks()->converted(*this);
  }
  void to(torch::Dtype dtype, bool non_blocking = false) override {
    M::to(dtype, non_blocking);
    if (forward_hooks() != nullptr) forward_hooks()->converted(*this);
  }
  void to(torch::Device device, bool non_blocking = false) override {
    M::to(device, non_blocking);
    if (forward_hooks() != nullptr) forward_hooks()->converted(*this);
  }

  /// What torch::save writes.
  ///
  /// Errors:  StateError if it is sharded: the parts of this rank would be written, and nobody
  /// would
  ///          know.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Prints what M prints.
  void pretty_print(std::ostream& stream) const override;

 protected:
  template <class... A>
  decltype(auto) call_forward(A&&... args) {
    return call_as_forward(*this, PlainForward<M>{this}, std::forward<A>(args)...);
  }
  template <class... A>
  decltype(auto) call_forward(A&&... args) const {
    FSDPModule& self = const_cast<HookedModule&>(*this);  // hooks change the module, forward not
    return call_as_forward(self, PlainForward<const M>{this}, std::forward<A>(args)...);
  }
};

template <class M, class... A, std::size_t... kFirst>
constexpr bool forward_takes_first(std::index_sequence<kFirst...>) {
  return ForwardTakes<M, std::tuple_element_t<kFirst, std::tuple<A...>>...>;
}

/// A HookedModule whose one forward has the very signature of M's. AnyModule and Sequential deduce
/// from it, and take no class with overloads.
template <class M, class Signature>
class ExactForward;

#define FSDP_EXACT_FORWARD(qualifiers, hooked_qualifiers)                                       \
  template <class M, class R, class C, class... A>                                              \
  class ExactForward<M, R (C::*)(A...) qualifiers> : public HookedModule<M> {                   \
    static_assert(std::is_invocable_v<R (C::*)(A...) qualifiers, M&, PassedArgument<A>...>,     \
                  "FSDP_MODULE: forward takes a non-const reference to tensors: what it "       \
                  "assigned would be lost. Take Tensor or const Tensor& and return the "        \
                  "result, or take Tensor*.");                                                  \
                                                                                                \
   public:                                                                                      \
    static constexpr bool kForwardHasDefaults =                                                 \
        sizeof...(A) > 0 && forward_takes_first<M, A...>(                                       \
                                std::make_index_sequence<sizeof...(A) - (sizeof...(A) > 0)>()); \
    using HookedModule<M>::HookedModule;                                                        \
    HookedResult<R> forward(A... args) hooked_qualifiers {                                      \
      return this->template call_forward<A...>(std::forward<A>(args)...);                       \
    }                                                                                           \
  };
FSDP_EXACT_FORWARD(, )
FSDP_EXACT_FORWARD(const, const)
FSDP_EXACT_FORWARD(noexcept, )
FSDP_EXACT_FORWARD(const noexcept, const)
#undef FSDP_EXACT_FORWARD

/// In the place of ExactForward where forward is overloaded or a template.
template <class M>
class NoExactForward : public HookedModule<M> {
 public:
  using HookedModule<M>::HookedModule;

 protected:
  class Nothing;
  void forward(Nothing);  // hides those of M, which run no hooks
};

/// Which classes serve M: `Base`, from which Hooked<M> derives; `Stored`, which AnyModule can hold;
/// `Named`, to which as<Block>() casts. Here for a forward that has no one signature.
template <class M>
struct HookedTypes {
  using Base = NoExactForward<M>;
  using Stored = Hooked<M>;
  using Named = Hooked<M>;
};
/// Where forward has one signature. Without default arguments that signature serves every call.
template <class M>
requires requires { sizeof(ExactForward<M, decltype(&M::forward)>); }
struct HookedTypes<M> {
  using Base = ExactForward<M, decltype(&M::forward)>;
  using Stored = Base;
  using Named = std::conditional_t<Base::kForwardHasDefaults, Hooked<M>, Base>;
};

/// The class of the objects that a holder makes: M, with hooks around whatever calls its forward.
template <class M>
class Hooked : public HookedTypes<M>::Base {
  using Base = typename HookedTypes<M>::Base;

 public:
  using Base::Base;

  using Base::forward;  // takes braces, and literals that convert to pointers
  /// Takes what M's forward takes: defaults, overloads and templates as M has them.
  template <class... A>
  requires ForwardTakes<M, A...>
  decltype(auto) forward(A&&... args) { return this->call_forward(std::forward<A>(args)...); }
  template <class... A>
  requires ForwardTakes<const M, A...>
  decltype(auto) forward(A&&... args) const { return this->call_forward(std::forward<A>(args)...); }

  torch::nn::Module& as_module() override { return *this; }
};

/// Whether M can be made of these arguments, and they are not just a Holder to copy.
template <class M, class Holder, class Head, class... Tail>
concept ConstructsAnew =
    !(sizeof...(Tail) == 0 &&
      std::is_base_of_v<Holder, std::remove_cvref_t<Head>>)&&std::is_constructible_v<M, Head,
                                                                                     Tail...>;

/// What FSDP_MODULE makes a class of: a ModuleHolder whose `*` and `->` give the hooked module.
template <class M>
class HookedHolder : public torch::nn::ModuleHolder<typename HookedTypes<M>::Stored> {
  using Stored = typename HookedTypes<M>::Stored;
  using Base = torch::nn::ModuleHolder<Stored>;

 public:
  /// What as<Block>() casts to.
  using ContainedType = typename HookedTypes<M>::Named;

  HookedHolder() : Base(nullptr) {
    static_assert(std::is_default_constructible_v<M>,
                  "This module has no default constructor. Write `Block block = nullptr;` for an "
                  "empty holder in place of `Block block;`.");
    if constexpr (std::is_default_constructible_v<M>) this->impl_ = std::make_shared<Hooked<M>>();
  }
  /* implicit */ HookedHolder(std::nullptr_t) : Base(nullptr) {}
  /// Makes an M of these arguments.
  template <class Head, class... Tail>
  requires ConstructsAnew<M, HookedHolder, Head, Tail...>
  explicit HookedHolder(Head&& head, Tail&&... tail) : Base(nullptr) {
    this->impl_ =
        std::make_shared<Hooked<M>>(std::forward<Head>(head), std::forward<Tail>(tail)...);
  }
  /// Holds a module that exists: what register_module() returned, or a cast gave.
  ///
  /// Errors:  ConfigError if it is an M that runs no hooks, as std::make_shared<BlockImpl>() makes.
  template <std::derived_from<M> T>
  /* implicit */ HookedHolder(std::shared_ptr<T> module) : Base(nullptr) {
    this->impl_ = std::dynamic_pointer_cast<Hooked<M>>(module);
    FSDP_CHECK(ConfigError, module == nullptr || this->impl_ != nullptr,
               "FSDP_MODULE: the holder was given a plain ", c10::demangle(typeid(M).name()),
               ", which runs no hooks. Make it with the holder's constructor, or with "
               "std::make_shared<Holder::Impl>.");
  }

  Hooked<M>* get() { return static_cast<Hooked<M>*>(Base::get()); }
  const Hooked<M>* get() const { return static_cast<const Hooked<M>*>(Base::get()); }
  Hooked<M>* operator->() { return get(); }
  const Hooked<M>* operator->() const { return get(); }
  Hooked<M>& operator*() { return *get(); }
  const Hooked<M>& operator*() const { return *get(); }

  template <class... A>
  requires ForwardTakes<Hooked<M>, A...>
  decltype(auto) operator()(A&&... args) { return get()->forward(std::forward<A>(args)...); }
};

template <class M>
std::shared_ptr<torch::nn::Module> HookedModule<M>::clone(
    const std::optional<torch::Device>& device) const {
  FSDP_CHECK(StateError, !is_fully_sharded(), "clone: ", c10::demangle(typeid(M).name()),
             " is sharded, and this rank has only its part of the parameters. Clone before "
             "fully_shard(), or make a new module and load a checkpoint into it.");
  std::shared_ptr<torch::nn::Module> copy = M::clone(device);
  if (dynamic_cast<HookedModule*>(copy.get()) != nullptr) return copy;  // M saw to it
  M* const plain = dynamic_cast<M*>(copy.get());
  FSDP_CHECK(ConfigError, plain != nullptr && std::is_move_constructible_v<M>,
             "clone: ", c10::demangle(typeid(M).name()), "::clone() made a ",
             copy ? copy->name() : "null",
             ", where a module of the same type was expected that can be moved. Derive the class "
             "from torch::nn::Cloneable of itself.");
  if constexpr (std::is_move_constructible_v<M>) {
    const auto hooked = std::make_shared<Hooked<M>>(FromCopy{}, std::move(*plain));
    hooked->set_activation_checkpoint(activation_checkpoint());
    return hooked;
  } else {
    return nullptr;
  }
}

template <class M>
void HookedModule<M>::save(torch::serialize::OutputArchive& archive) const {
  FSDP_CHECK(StateError, !is_fully_sharded(), "torch::save: ", c10::demangle(typeid(M).name()),
             " is sharded, and this rank has only its part of the parameters. Save what "
             "full_tensor() gives for each of named_parameters(), on one rank; or, to save this "
             "rank's parts as such, torch::save(fsdp::parameters(module), ...).");
  M::save(archive);
}

template <class M>
void HookedModule<M>::pretty_print(std::ostream& stream) const {
  using Inherited = void (torch::nn::Module::*)(std::ostream&) const;
  if constexpr (std::is_same_v<decltype(&M::pretty_print), Inherited>) {
    const bool named = this->name() != c10::demangle(typeid(*this).name());
    stream << (named ? this->name() : c10::demangle(typeid(M).name()));
  } else {
    M::pretty_print(stream);
  }
}

}  // namespace fsdp
