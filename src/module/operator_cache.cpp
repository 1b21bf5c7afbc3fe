#include "module/operator_cache.h"

#include <algorithm>
#include <array>
#include <string_view>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "fsdp/error.h"

namespace fsdp {
namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::Fake;

thread_local OperatorScope* innermost_scope = nullptr;

void run_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack& stack) {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), &stack);
}

void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(kKey);  // not the operators that it is made of
  if (innermost_scope == nullptr) return run_operator(op, keys, *stack);
  innermost_scope->call(op, keys, *stack);
}

void register_fallback() {
  static torch::Library library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  static const bool registered = [] {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&intercept>());
    return true;
  }();
  (void)registered;
}

// Whether the results are tensors of their own: neither views of arguments nor edited arguments.
bool makes_new_tensors(const c10::FunctionSchema& schema) {
  if (schema.is_mutable()) return false;
  return std::all_of(schema.returns().begin(), schema.returns().end(),
                     [](const c10::Argument& result) { return result.alias_info() == nullptr; });
}

// Puts `change(tensor)` in the place of each tensor.
template <class Change>
c10::IValue with_tensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(change(tensor)) : value;
  }
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> changed;
  for (const at::Tensor& tensor : value.toTensorVector()) {
    changed.push_back(tensor.defined() ? change(tensor) : tensor);
  }
  return changed;
}

// torch keeps no graph for a recomputation of its own; one that is not kept is used once.
bool is_last_use() {
  return torch::autograd::get_current_graph_task_id() != -1 &&
         !torch::autograd::get_current_graph_task_keep_graph();
}

}  // namespace

SavePolicy save_matmuls_and_attention() {
  return [](const std::string& name) {
    static constexpr std::array<std::string_view, 9> kNames = {
        "aten::mm",         "aten::addmm", "aten::bmm",   "aten::baddbmm",    "aten::addbmm",
        "aten::_scaled_mm", "aten::mv",    "aten::addmv", "aten::convolution"};
    constexpr std::string_view kAttention = "aten::_scaled_dot_product_";
    return std::find(kNames.begin(), kNames.end(), name) != kNames.end() ||
           name.compare(0, kAttention.size(), kAttention) == 0;
  };
}

OperatorScope::OperatorScope(OperatorCache* cache, OperatorScopeMode mode)
    : cache_(cache),
      mode_(mode),
      outer_(std::exchange(innermost_scope, this)),
      key_was_included_(c10::impl::tls_is_dispatch_key_included(kKey)) {
  if (cache_ != nullptr) register_fallback();
  c10::impl::tls_set_dispatch_key_included(kKey, cache_ != nullptr);
}

OperatorScope::~OperatorScope() {
  c10::impl::tls_set_dispatch_key_included(kKey, key_was_included_);
  innermost_scope = outer_;
}

void OperatorScope::call(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack& stack) {
  if (cache_ == nullptr || !makes_new_tensors(op.schema())) return run_operator(op, keys, stack);
  const size_t run = num_runs_[op.operator_name()]++;
  if (mode_ == OperatorScopeMode::kRecord) {
    record(op, keys, stack, run);
  } else {
    replay(op, keys, stack, run);
  }
}

void OperatorScope::record(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                           torch::jit::Stack& stack, size_t run) {
  run_operator(op, keys, stack);
  if (!cache_->policy_(op.operator_name().name)) return;
  OperatorCache::Results results;
  // An alias without autograd that shares the version counter.
  const auto alias = [&](const at::Tensor& tensor) {
    results.versions.push_back(static_cast<int64_t>(tensor._version()));
    return tensor.tensor_data();
  };
  const auto values = torch::jit::last(stack, op.schema().returns().size());
  for (const c10::IValue& value : values) results.values.push_back(with_tensors(value, alias));
  if (cache_->preserve_rng_state_ && op.hasTag(at::Tag::nondeterministic_seeded)) {
    std::vector<at::Tensor> tensors;
    TensorRefs made;
    for (const c10::IValue& value : values) {
      if (value.isTensor() && value.toTensor().defined()) tensors.push_back(value.toTensor());
    }
    for (at::Tensor& tensor : tensors) made.push_back(&tensor);
    results.generators = GeneratorStates(default_generators(made));
  }
  cache_->results_[op.operator_name()].emplace(run, std::move(results));
}

void OperatorScope::replay(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                           torch::jit::Stack& stack, size_t run) {
  OperatorCache::ResultsByRun& saved = cache_->results_[op.operator_name()];
  const auto found = saved.find(run);
  if (found == saved.end()) return run_operator(op, keys, stack);
  const OperatorCache::Results& results = found->second;
  size_t index = 0;
  // A tensor of its own: autograd will write its history into it.
  const auto fresh = [&](const at::Tensor& tensor) {
    FSDP_CHECK(StateError, tensor._version() == results.versions[index++],
               "checkpoint: a result of ", op.operator_name().name,
               " that the policy saves was edited in place after it was made, so it cannot be used "
               "in backward. Use an operator that makes a new tensor, or a policy that leaves ",
               op.operator_name().name, " out.");
    return tensor.variable_data();
  };
  torch::jit::drop(stack, op.schema().arguments().size());
  for (const c10::IValue& value : results.values) stack.push_back(with_tensors(value, fresh));
  results.generators.restore();
  if (is_last_use()) saved.erase(found);
}

}  // namespace fsdp
