#pragma once

#include <string>
#include <unordered_map>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "fsdp/activation.h"
#include "module/thread_state.h"

namespace fsdp {

/// The results of those operators of one forward that a policy picks, for its recomputation.
///
/// [Note: the operator interceptor]
/// Pack hooks see tensors, not operators. So while an OperatorScope is open, the dispatcher gives
/// each operator of this thread to us: through the dispatch key Fake, which lies below autograd,
/// which no kernel in libtorch's C++ uses, and for which the first scope of the process registers
/// a fallback. Without a scope the key is off and costs nothing.
///
/// Results are found again by the operator's name and how often it has run: what hooks of sharded
/// modules do besides differs between forward and recomputation.
class OperatorCache {
 public:
  /// `preserve_rng_state`: an operator that draws random numbers leaves the generators as it did in
  /// forward, also when it does not run.
  OperatorCache(SavePolicy policy, bool preserve_rng_state)
      : policy_(std::move(policy)), preserve_rng_state_(preserve_rng_state) {}

 private:
  friend class OperatorScope;
  struct Results {
    torch::jit::Stack values;
    std::vector<int64_t> versions;  // of the tensors among them, when they were made
    GeneratorStates generators;
  };
  using ResultsByRun = std::unordered_map<size_t, Results>;

  SavePolicy policy_;
  bool preserve_rng_state_;
  std::unordered_map<c10::OperatorName, ResultsByRun> results_;
};

enum class OperatorScopeMode { kRecord, kReplay };

/// While it exists, operators on this thread are recorded in `cache` or replayed from it; the
/// innermost scope alone. Null: they just run.
class OperatorScope {
 public:
  OperatorScope(OperatorCache* cache, OperatorScopeMode mode);
  ~OperatorScope();
  OperatorScope(const OperatorScope&) = delete;
  OperatorScope& operator=(const OperatorScope&) = delete;

  /// Runs the operator, or puts its results of forward in place of its arguments.
  /// Errors: StateError if a result was edited in place since.
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack);

 private:
  void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack,
              size_t run);
  void replay(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack,
              size_t run);

  OperatorCache* cache_;
  OperatorScopeMode mode_;
  std::unordered_map<c10::OperatorName, size_t> num_runs_;
  OperatorScope* outer_;
  bool key_was_included_;
};

}  // namespace fsdp
