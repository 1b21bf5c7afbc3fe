#include <map>
#include <optional>

#include <ATen/ops/empty.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/nn/module.h>

#include "fsdp/activation.h"
#include "module/engine.h"
#include "module/offload.h"
#include "module/operator_cache.h"
#include "module/thread_state.h"

namespace fsdp {
namespace {

namespace autograd = torch::autograd;

// Thrown through the function when backward has what it needs. It derives from nothing, so that no
// handler of real errors takes it for one.
struct StopRecompute {};

struct TensorForm {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  c10::Device device;

  explicit TensorForm(const at::Tensor& tensor)
      : sizes(tensor.sizes().vec()), dtype(tensor.scalar_type()), device(tensor.device()) {}
  bool operator==(const TensorForm&) const = default;
  [[nodiscard]] std::string text() const {
    return c10::str("shape ", at::IntArrayRef(sizes), ", ", dtype, ", ", device);
  }
};

// A tensor that forward would have saved.
struct Slot {
  std::optional<TensorForm> form;  // with the determinism check
  bool is_needed = true;           // its node is alive
};

// What one backward has recomputed. Each tensor is given out once.
struct Recomputation {
  struct Kept {
    at::Tensor tensor;
    int64_t version;
  };
  std::vector<std::optional<Kept>> kept;  // by slot
  size_t num_saved = 0;                   // also such as forward did not save
  std::string difference;                 // of the first tensor that has another form

  [[nodiscard]] bool has(size_t index) const { return index < kept.size() && kept[index]; }
};

// The arguments, saved as autograd saves: through the hooks of the scope outside.
class SavedInputs {
 public:
  explicit SavedInputs(const TensorRefs& inputs) {
    const at::Tensor nothing = at::empty({0});
    for (at::Tensor* input : inputs) {
      // An alias, since the input's own graph may come to contain this object.
      tensors_.emplace_back(input->tensor_data(), /*is_output=*/false);
      requires_grad_.push_back(input->requires_grad());
      *input = nothing;
    }
  }
  [[nodiscard]] std::vector<at::Tensor> unpack() const {
    std::vector<at::Tensor> inputs;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      inputs.push_back(tensors_[i].unpack().detach().set_requires_grad(requires_grad_[i]));
    }
    return inputs;
  }

 private:
  std::vector<autograd::SavedVariable> tensors_;
  std::vector<bool> requires_grad_;
};

// One checkpointed call. The graph owns it: each tensor not saved has hooks that hold it.
class Frame final : public SavedTensorPacker, public std::enable_shared_from_this<Frame> {
 public:
  Frame(const CheckpointOptions& options, std::unique_ptr<RepeatableCall> call,
        const std::type_info& function, bool can_stop_early)
      : early_stop_(options.early_stop && can_stop_early),
        checks_(options.determinism_check == DeterminismCheck::kDefault),
        call_(std::move(call)),
        function_(&function) {
    const TensorRefs inputs = call_->tensors();
    autocast_.emplace(inputs);
    std::vector<at::Generator> generators = options.generators;
    if (options.preserve_rng_state) {
      for (at::Generator& generator : default_generators(inputs)) {
        generators.push_back(std::move(generator));
      }
    }
    generators_ = GeneratorStates(std::move(generators));
    if (options.save_policy) cache_.emplace(options.save_policy, options.preserve_rng_state);
    inputs_.emplace(inputs);  // last: it takes them
  }

  OperatorCache* cache() { return cache_ ? &*cache_ : nullptr; }

  // Forward: drops a tensor. Backward: makes it again.
  std::unique_ptr<autograd::SavedVariableHooks> make_hooks() override;
  void scope_ended() override { forward_done_ = true; }
  size_t drop(const at::Tensor& tensor);
  at::Tensor unpack(size_t index);
  void forget(size_t index);

  // Recomputation.
  void keep(const at::Tensor& tensor, Recomputation& result) const;

 private:
  [[nodiscard]] Recomputation recompute();
  void check(const Recomputation& result) const;
  [[nodiscard]] std::string name() const { return c10::demangle(function_->name()); }

  bool early_stop_;
  bool checks_;
  GeneratorStates generators_;
  std::optional<AutocastState> autocast_;
  std::optional<OperatorCache> cache_;
  std::optional<SavedInputs> inputs_;
  std::unique_ptr<RepeatableCall> call_;
  const std::type_info* function_;
  bool forward_done_ = false;
  std::vector<Slot> slots_;
  std::map<int, Recomputation> recomputed_;  // by graph task, until used up
};

class DropHooks final : public autograd::SavedVariableHooks {
 public:
  explicit DropHooks(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  ~DropHooks() override {
    if (index_) frame_->forget(*index_);
  }
  void call_pack_hook(const at::Tensor& tensor) override { index_ = frame_->drop(tensor); }
  at::Tensor call_unpack_hook() override { return frame_->unpack(*index_); }

 private:
  std::shared_ptr<Frame> frame_;
  std::optional<size_t> index_;
};

// The recomputed graph may be used too: by a backward inside of the function.
class KeepHooks final : public autograd::SavedVariableHooks {
 public:
  KeepHooks(const Frame& frame, Recomputation& result) : frame_(&frame), result_(&result) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = tensor.tensor_data();
    frame_->keep(tensor_, *result_);
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  const Frame* frame_;  // both until packed
  Recomputation* result_;
  at::Tensor tensor_;
};

class KeepPacker final : public SavedTensorPacker {
 public:
  KeepPacker(const Frame& frame, Recomputation& result) : frame_(frame), result_(result) {}
  std::unique_ptr<autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<KeepHooks>(frame_, result_);
  }

 private:
  const Frame& frame_;
  Recomputation& result_;
};

std::unique_ptr<autograd::SavedVariableHooks> Frame::make_hooks() {
  return std::make_unique<DropHooks>(shared_from_this());
}

size_t Frame::drop(const at::Tensor& tensor) {
  Slot& slot = slots_.emplace_back();
  if (checks_) slot.form.emplace(tensor);
  return slots_.size() - 1;
}

at::Tensor Frame::unpack(size_t index) {
  const int graph_task = autograd::get_current_graph_task_id();
  auto found = recomputed_.find(graph_task);
  // Also a tensor that was given out already, to a custom Function that asks twice.
  if (found == recomputed_.end() || !found->second.has(index)) {
    Recomputation result = recompute();
    check(result);
    if (graph_task != -1 && found == recomputed_.end()) {
      // What this backward does not use shall not stay until the graph goes.
      autograd::Engine::get_default_engine().queue_callback([frame = weak_from_this(), graph_task] {
        if (const auto alive = frame.lock()) alive->recomputed_.erase(graph_task);
      });
    }
    found = recomputed_.insert_or_assign(graph_task, std::move(result)).first;
  }
  const Recomputation::Kept kept = *std::exchange(found->second.kept[index], std::nullopt);
  if (graph_task == -1) recomputed_.erase(found);
  FSDP_CHECK(StateError, kept.tensor._version() == kept.version, "checkpoint: saved tensor ",
             index + 1, " of ", slots_.size(), " (", TensorForm(kept.tensor).text(), ") of ",
             name(),
             " was edited in place after autograd had saved it. Use an operator that makes "
             "a new tensor.");
  return kept.tensor;
}

// The node that the tensor was saved for is gone, or will not be run again.
void Frame::forget(size_t index) {
  slots_[index].is_needed = false;
  for (auto& [graph_task, result] : recomputed_) {
    if (result.has(index)) result.kept[index].reset();
  }
}

Recomputation Frame::recompute() {
  const std::vector<at::Tensor> inputs = inputs_->unpack();  // an outer frame recomputes first
  Recomputation result;
  result.kept.resize(slots_.size());
  KeepPacker packer(*this, result);
  const GeneratorStates generators_before = generators_.now();
  struct RestoreGenerators {
    const GeneratorStates& states;
    ~RestoreGenerators() { states.restore(); }
  } const restore_generators{generators_before};
  generators_.restore();
  const AutocastState::Guard autocast(*autocast_);
  const c10::AutoGradMode grad_mode(true);
  const OperatorScope operators(cache(), OperatorScopeMode::kReplay);
  const PackScope scope(&packer);
  try {
    call_->call(inputs);
  } catch (const StopRecompute&) {
  }
  return result;
}

void Frame::keep(const at::Tensor& tensor, Recomputation& result) const {
  const size_t index = result.num_saved++;
  // More than forward had: somebody has caught StopRecompute, or forward is not done yet.
  if (index >= result.kept.size()) return;
  const Slot& slot = slots_[index];
  if (slot.form && result.difference.empty() && TensorForm(tensor) != *slot.form) {
    result.difference =
        c10::str("saved tensor ", index + 1, " of ", slots_.size(), " had ", slot.form->text(),
                 " in forward, and has ", TensorForm(tensor).text(), " when computed again");
  }
  if (slot.is_needed) {
    result.kept[index] = {.tensor = tensor, .version = static_cast<int64_t>(tensor._version())};
  }
  if (early_stop_ && result.num_saved == result.kept.size()) throw StopRecompute{};
}

void Frame::check(const Recomputation& result) const {
  static constexpr const char* kAdvice =
      ". The function must compute the same each time it is called: from its arguments, from "
      "values "
      "that do not change until backward, and with torch's default generators.";
  const bool too_many = result.num_saved > slots_.size() && !early_stop_ && forward_done_;
  FSDP_CHECK(StateError, result.num_saved >= slots_.size() && !too_many,
             "checkpoint: autograd saved ", slots_.size(), " tensors in forward of ", name(),
             ", and ", result.num_saved, " when it was computed again", kAdvice);
  FSDP_CHECK(StateError, result.difference.empty(), "checkpoint: of ", name(), ", ",
             result.difference, kAdvice);
}

}  // namespace

struct CheckpointScope::Impl {
  std::shared_ptr<SavedTensorPacker> packer;
  std::optional<OperatorScope> operators;
  std::optional<PackScope> packs;
};

CheckpointScope::CheckpointScope(const CheckpointOptions& options,
                                 std::unique_ptr<RepeatableCall> call,
                                 const std::type_info& function, bool can_stop_early)
    : impl_(std::make_unique<Impl>()) {
  if (options.offload_to_host) {
    impl_->packer = std::make_shared<OffloadPacker>();
  } else {
    const auto frame = std::make_shared<Frame>(options, std::move(call), function, can_stop_early);
    if (frame->cache() != nullptr) {
      impl_->operators.emplace(frame->cache(), OperatorScopeMode::kRecord);
    }
    impl_->packer = frame;
  }
  impl_->packs.emplace(impl_->packer.get());
}

CheckpointScope::~CheckpointScope() = default;

void throw_not_repeatable(const std::type_info& function) {
  throw ConfigError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      c10::str("checkpoint: cannot call ", c10::demangle(function.name()),
               " again in backward: it, or one of its arguments, cannot be copied. Pass it by "
               "pointer, or leave this module without checkpoint()."));
}

FSDPModule& checkpoint(torch::nn::Module& module, const CheckpointOptions& options) {
  auto* const hooked = dynamic_cast<FSDPModule*>(&module);
  FSDP_CHECK(ConfigError, hooked != nullptr, "checkpoint: module of type ", module.name(),
             " runs no hooks. Declare it with FSDP_MODULE in place of TORCH_MODULE, and make it "
             "with its holder.");
  FSDP_CHECK(ConfigError, hooked->activation_checkpoint() == nullptr, "checkpoint: module of type ",
             module.name(), " has been given to checkpoint() before.");
  hooked->set_activation_checkpoint(std::make_shared<const CheckpointOptions>(options));
  return *hooked;
}

}  // namespace fsdp
