#include "module/replicate_state.h"

#include <algorithm>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "fsdp/error.h"

namespace fsdp {
namespace {

namespace autograd = torch::autograd;

constexpr double kMiB = 1 << 20;
constexpr size_t kBroadcastBytes = 250 << 20;  // as in DistributedDataParallel

bool backward_runs() { return autograd::get_current_graph_task_id() != -1; }

size_t bytes_of(double mib) { return std::max<size_t>(1, static_cast<size_t>(mib * kMiB)); }

// The constructor got one more parameter in some release after torch 2.11.
template <typename... Common>
std::shared_ptr<c10d::Reducer> reducer_of(const Common&... common) {
  using Limits = std::vector<int64_t>;
  if constexpr (std::is_constructible_v<c10d::Reducer, const Common&..., bool, bool, Limits>) {
    return std::make_shared<c10d::Reducer>(common..., /*skip_all_reduce_unused_params=*/false,
                                           /*use_python_reducer=*/false, Limits{});
  } else {
    return std::make_shared<c10d::Reducer>(common..., /*skip_all_reduce_unused_params=*/false,
                                           /*use_python_reducer=*/false);
  }
}

// The identity, one node behind all outputs: so the engine also comes to parameters that only
// outputs without a gradient depend on, and brings them none.
class Sink final : public autograd::Node {
 public:
  explicit Sink(std::shared_ptr<ReplicateState> state) : state_(std::move(state)) {}

  autograd::variable_list apply(autograd::variable_list&& grads) override {
    state_->outputs_have_gradients();
    return std::move(grads);
  }
  std::string name() const override { return "fsdp::ReplicateSink"; }

 private:
  std::shared_ptr<ReplicateState> state_;
};

void add_sink(TensorRefs& outputs, const std::shared_ptr<ReplicateState>& state) {
  autograd::edge_list edges;
  for (const at::Tensor* output : outputs) {
    if (output->requires_grad()) edges.push_back(autograd::impl::gradient_edge(*output));
  }
  if (edges.empty()) return;
  auto node = c10::make_intrusive<Sink>(state);
  node->set_next_edges(std::move(edges));
  for (at::Tensor* output : outputs) {
    if (!output->requires_grad()) continue;
    at::Tensor copy;  // a view could not be edited in place
    {
      const c10::NoGradGuard no_grad;
      copy = output->clone();
    }
    autograd::create_gradient_edge(copy, node);
    *output = std::move(copy);
  }
}

}  // namespace

ReplicateState::ReplicateState(ReplicatedTensors tensors, const ReplicateOptions& options)
    : tensors_(std::move(tensors)), options_(options) {
  for (size_t i = 0; i < tensors_.params.size(); ++i) {
    if (!tensors_.params[i].requires_grad()) continue;
    trainable_.push_back(tensors_.params[i]);
    trainable_names_.push_back(tensors_.names[i]);
  }
  if (options_.init_sync) {
    std::vector<at::Tensor> all;
    for (const at::Tensor& param : tensors_.params) all.push_back(param.detach());
    all.insert(all.end(), tensors_.buffers.begin(), tensors_.buffers.end());
    const c10::NoGradGuard no_grad;
    c10d::broadcast_coalesced(options_.process_group, all, kBroadcastBytes);
  }
  make_reducer();
}

// Gradients that autograd knows to be views cannot be detached in place, and the zero_grad() of
// libtorch's optimizers and modules does just that. Below autograd's keys nothing is known.
void ReplicateState::make_reducer() {
  const at::AutoDispatchBelowADInplaceOrView untracked_views;
  const std::vector<bool> not_sparse(trainable_.size(), false);
  const auto cap = static_cast<int64_t>(bytes_of(options_.bucket_cap_mb));
  const auto first_cap =
      std::min(cap, static_cast<int64_t>(bytes_of(options_.first_bucket_cap_mb)));
  auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(
      trainable_, {static_cast<size_t>(first_cap), static_cast<size_t>(cap)}, not_sparse);
  std::reverse(buckets.begin(), buckets.end());  // about the order of backward
  std::unordered_map<size_t, std::string> names;
  for (size_t i = 0; i < trainable_.size(); ++i) names[i] = trainable_names_[i];
  reducer_ = reducer_of(trainable_, buckets, options_.process_group, not_sparse, cap,
                        options_.find_unused_parameters, options_.gradient_as_bucket_view, names,
                        first_cap);
  if (options_.static_graph) reducer_->set_static_graph();
  logger_ = std::make_shared<c10d::Logger>(reducer_);
  reducer_->set_logger(logger_);  // without one a search for unused parameters crashes
  knows_static_graph_ = false;
}

void ReplicateState::pre_forward(torch::nn::Module&, TensorRefs&) {
  if (backward_runs()) return;  // recomputed: the step has begun
  if (num_forwards_++ > 0) return;
  if (c10::GradMode::is_enabled()) begin_step();
  if (buffers_may_differ_) broadcast_buffers();
}

void ReplicateState::begin_step() {
  if (std::exchange(in_backward_, false)) start_over();
  check_last_backward();
  if (requires_sync_) reducer_->prepare_for_forward();
  const at::AutoDispatchBelowADInplaceOrView untracked_views;
  reducer_->rebuild_buckets();  // once, in the order that the first backward had
}

// The last backward threw. Its all-reduces may still be under way in the buckets, and in the
// gradients that lie there.
void ReplicateState::start_over() {
  for (at::Tensor& param : trainable_) {
    if (param.grad().defined()) param.mutable_grad() = param.grad().clone();
  }
  make_reducer();
}

void ReplicateState::check_last_backward() const {
  try {
    reducer_->check_finalized();
  } catch (const c10::Error& error) {
    std::string without_grad;
    for (size_t i = 0; i < trainable_.size(); ++i) {
      if (trainable_[i].grad().defined()) continue;
      without_grad += (without_grad.empty() ? "'" : ", '") + trainable_names_[i] + "'";
    }
    FSDP_CHECK(StateError, false,
               "forward: the last backward brought some parameters of the replicated module no "
               "gradient (",
               without_grad.empty() ? "all have one of an earlier step" : without_grad,
               "), so their buckets were not reduced, and gradients differ between ranks. If "
               "forward does not use all parameters, or not all of its outputs go into the loss, "
               "set find_unused_parameters in replicate(), on every rank.");
  }
}

void ReplicateState::broadcast_buffers() {
  if (!options_.broadcast_buffers || tensors_.buffers.empty()) return;
  const c10::NoGradGuard no_grad;
  c10d::broadcast_coalesced(options_.process_group, tensors_.buffers, kBroadcastBytes);
}

void ReplicateState::post_forward(torch::nn::Module&, TensorRefs& outputs) {
  if (backward_runs()) return;
  if (--num_forwards_ > 0) return;
  const bool syncs = c10::GradMode::is_enabled() && requires_sync_;
  buffers_may_differ_ = syncs;
  if (!syncs) return;

  const bool searches = options_.find_unused_parameters && !options_.static_graph;
  std::vector<at::Tensor> roots;
  for (size_t i = 0; searches && i < outputs.size(); ++i) {
    if (outputs[i]->requires_grad()) roots.push_back(*outputs[i]);
  }
  reducer_->prepare_for_backward(roots);
  if (searches || (options_.static_graph && !knows_static_graph_)) {
    add_sink(outputs, shared_from_this());
  }
  for (const at::Tensor* output : outputs) {
    if (!output->requires_grad() || output->is_leaf()) continue;
    output->register_hook(
        [state = shared_from_this()](const at::Tensor&) { state->backward_begins(); });
  }
}

void ReplicateState::forward_threw(torch::nn::Module&) noexcept {
  if (!backward_runs()) num_forwards_ = 0;
}

void ReplicateState::converted(torch::nn::Module&) { make_reducer(); }

void ReplicateState::backward_begins() {
  if (std::exchange(in_backward_, true)) return;
  autograd::Engine::get_default_engine().queue_callback(
      [state = shared_from_this()] { state->in_backward_ = false; });
}

void ReplicateState::outputs_have_gradients() {
  if (!options_.static_graph || std::exchange(knows_static_graph_, true)) return;
  autograd::Engine::get_default_engine().queue_callback(
      [state = shared_from_this()] { state->reducer_->delay_all_reduce(); });
}

}  // namespace fsdp
