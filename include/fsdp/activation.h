#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Type.h>

#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"
#include "fsdp/pytree.h"

/// Trades the memory of activations for time: recompute them in backward, or keep them on the host.
///
/// [Note: what is called again]
/// Backward calls the function again with copies of its arguments, made before the first call. As
/// std::thread does, checkpoint() copies what it is given; std::ref() passes a reference. Tensors
/// are found in the types that pytree.h knows, and are saved as autograd saves: an outer
/// checkpoint() recomputes those of an inner one, an outer offload_activations() moves them.
///
///  - The function has to compute the same each time, from the same outer values. What it does
///    besides happens again: BatchNorm counts a batch twice, as in PyTorch.
///  - Without `early_stop = false` it is left in the middle, by an exception that does not derive
///    from std::exception and that no function on the way may be declared noexcept against (the
///    function itself may: it is then not stopped early). A `catch (...)` on the way rethrows.
///  - An edit in place of an input, or of a tensor that autograd has saved, is an error in
///  backward.
///  - Random numbers: [Note: generators].
///
/// [Note: generators]
/// torch's default CPU generator belongs to the process. Where one thread at a time draws from it,
/// recomputation draws what forward drew, and leaves the generator as it was. Where ranks are
/// threads that draw from it at once, forward gives numbers that depend on timing, and backward
/// other ones: gradients would be wrong, and nothing tells. There, give every rank a generator of
/// its own, and name it in `generators`. Default generators of devices belong to the process too;
/// ranks that each have a device do not share one.
namespace fsdp {

enum class DeterminismCheck {
  kDefault,  ///< the shape, dtype and device of each recomputed tensor must be those of forward
  kNone,
};

/// Whether to keep the results of an operator, by its name: "aten::addmm".
///
/// Asked once for each operator that runs in forward, in order; it may count.
using SavePolicy = std::function<bool(const std::string& operator_name)>;

/// Keeps the results of matrix products, convolutions and attention: what is slow to recompute.
/// Source: PyTorch 2.13, the list in torch.utils.checkpoint's documentation of selective policies.
[[nodiscard]] SavePolicy save_matmuls_and_attention();

/// How checkpoint() treats what autograd would save for backward.
struct CheckpointOptions {
  /// Recompute with the random numbers of forward, drawn from the default generators of the CPU and
  /// of the inputs' devices. See [Note: generators].
  bool preserve_rng_state = true;
  /// Other generators that the function draws from.
  std::vector<at::Generator> generators;
  /// Stop as soon as the last tensor that backward needs is there.
  bool early_stop = true;
  DeterminismCheck determinism_check = DeterminismCheck::kDefault;
  /// Move saved tensors to the host, and compute nothing again; all of the above is then unused.
  bool offload_to_host = false;
  /// Keep the results of some operators and recompute the rest from them. Views and edits in place
  /// are always made again. Empty: recompute everything.
  SavePolicy save_policy;
};

/// A call that can be made again and again.
class RepeatableCall {
 public:
  virtual ~RepeatableCall() = default;
  /// Those of its arguments, to read and to replace.
  virtual TensorRefs tensors() = 0;
  /// Calls with these tensors in their places.
  virtual void call(const std::vector<at::Tensor>& tensors) = 0;
};

/// While it exists, what autograd saves on this thread is dropped, and `call` makes it again in
/// backward; or as the options say. The base of checkpoint(); scopes nest.
class CheckpointScope {
 public:
  /// Moves the tensors out of `call`. `function` is for errors. `can_stop_early`: an exception may
  /// leave it.
  CheckpointScope(const CheckpointOptions& options, std::unique_ptr<RepeatableCall> call,
                  const std::type_info& function, bool can_stop_early);
  ~CheckpointScope();
  CheckpointScope(const CheckpointScope&) = delete;
  CheckpointScope& operator=(const CheckpointScope&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// An argument A&& to be passed any number of times.
template <class A, bool = contains_tensors<A>>
struct RepeatedArgument {
  using Stored = std::decay_t<A>;
  using Passed = std::conditional_t<std::is_same_v<std::remove_cvref_t<A>, Stored>, A&&, Stored&&>;
};
template <class A>
struct RepeatedArgument<A, true> {
  using Stored = OwnedTensorsOf<A>;
  using Passed = std::conditional_t<std::is_lvalue_reference_v<A>, const Stored&, Stored&&>;
};

/// The call `function(args...)`, with copies of both.
template <class Function, class... A>
class RepeatedCall final : public RepeatableCall {
  using Arguments = std::tuple<typename RepeatedArgument<A>::Stored...>;

 public:
  static constexpr bool kPossible =
      std::is_copy_constructible_v<Function> &&
      (std::is_copy_constructible_v<typename RepeatedArgument<A>::Stored> && ...) &&
      (std::is_constructible_v<typename RepeatedArgument<A>::Stored, std::remove_reference_t<A>&> &&
       ...) &&
      std::is_invocable_v<Function&, typename RepeatedArgument<A>::Passed...>;

  RepeatedCall(const Function& function, std::remove_reference_t<A>&... args)
      : function_(function), arguments_(args...) {}

  TensorRefs tensors() override {
    TensorRefs refs;
    collect_tensors(arguments_, refs);
    return refs;
  }
  void call(const std::vector<at::Tensor>& tensors) override {
    Arguments arguments = arguments_;  // the call may change its own
    TensorRefs refs;
    collect_tensors(arguments, refs);
    for (size_t i = 0; i < refs.size(); ++i) *refs[i] = tensors[i];
    const auto with_arguments = [this](auto&... stored) {
      static_cast<void>(
          std::invoke(function_, static_cast<typename RepeatedArgument<A>::Passed>(stored)...));
    };
    std::apply(with_arguments, arguments);
  }

 private:
  Function function_;
  Arguments arguments_;
};

/// Throws ConfigError: this function, or an argument of it, cannot be copied.
[[noreturn]] void throw_not_repeatable(const std::type_info& function);

/// A RepeatedCall. Errors: ConfigError if the function or an argument cannot be copied.
template <class Function, class... A>
std::unique_ptr<RepeatableCall> repeatable_call(const Function& function,
                                                std::remove_reference_t<A>&... args) {
  if constexpr (RepeatedCall<Function, A...>::kPossible) {
    return std::make_unique<RepeatedCall<Function, A...>>(function, args...);
  } else {
    throw_not_repeatable(typeid(Function));
  }
}

/// Calls `function(args...)` and keeps nothing of what autograd would save in it: backward calls it
/// again and takes the tensors from there. Without grad mode it is just the call.
///
/// `checkpoint(block, x)`, `checkpoint([=](at::Tensor t) { return ...; }, x)`.
/// Gradients are bit-equal to those without checkpoint(). See [Note: what is called again].
///
/// Memory:  the inputs stay, and what the function refers to; in backward, all that it saves, each
///          tensor until it was used.
/// Ranks:   sharded modules inside are gathered for recomputation where they are not unsharded, so
///          every rank makes the same calls.
/// Threads: backward may run on another thread. One device per call: two threads of the engine
///          must not ask for its tensors at the same time.
/// Errors:  in backward, StateError if the tensors that were recomputed are not like those of
///          forward; names the first one. What `function` throws there goes through backward.
/// Source:  PyTorch 2.13, torch.utils.checkpoint.checkpoint(use_reentrant=False).
template <class Function, class... A>
requires std::invocable < std::remove_reference_t<Function>
&, A... > decltype(auto) checkpoint(const CheckpointOptions& options, Function&& function,
                                    A&&... args) {
  static_assert(RepeatedCall<std::decay_t<Function>, A...>::kPossible,
                "fsdp::checkpoint: the function and its arguments are copied, to be called again "
                "in backward. Pass by pointer or std::ref() what cannot be copied; tensors are "
                "passed by value or const reference.");
  if (!c10::GradMode::is_enabled()) return std::invoke(function, std::forward<A>(args)...);
  const CheckpointScope scope(options,
                              repeatable_call<std::decay_t<Function>, A...>(function, args...),
                              typeid(Function), !std::is_nothrow_invocable_v<Function&, A...>);
  return std::invoke(function, std::forward<A>(args)...);
}
template <class Function, class... A>
requires std::invocable < std::remove_reference_t<Function>
&, A... > decltype(auto) checkpoint(Function&& function, A&&... args) {
  return fsdp::checkpoint(CheckpointOptions{}, std::forward<Function>(function),
                          std::forward<A>(args)...);
}

/// Calls `function(args...)`; what autograd saves in it goes to the host, and comes back when
/// backward needs it.
///
/// Parameters stay where they are: those of a group are freed and gathered with it.
/// Around checkpoint() it moves the inputs of the checkpointed calls.
/// Memory:  a tensor that several operators save is copied once. On CPU it saves nothing.
/// Source:  PyTorch 2.13, torch.autograd.graph.save_on_cpu(pin_memory=True).
template <class Function, class... A>
requires std::invocable < std::remove_reference_t<Function>
&, A... > decltype(auto) offload_activations(Function&& function, A&&... args) {
  if (!c10::GradMode::is_enabled()) return std::invoke(function, std::forward<A>(args)...);
  const CheckpointScope scope({.offload_to_host = true}, nullptr, typeid(Function), false);
  return std::invoke(function, std::forward<A>(args)...);
}

/// Makes every forward of `module` a checkpoint(), with these options.
///
/// Before or after fully_shard(), which it stands inside of: hooks of the sharded module run around
/// forward, and again around its recomputation.
/// Errors:  ConfigError if `module` runs no hooks (its type was not declared with FSDP_MODULE), or
///          has been given to checkpoint() before. ConfigError in forward if it has arguments that
///          cannot be copied.
/// Source:  PyTorch 2.13, torch.distributed._composable.checkpoint.
FSDPModule& checkpoint(torch::nn::Module& module, const CheckpointOptions& options = {});

}  // namespace fsdp
