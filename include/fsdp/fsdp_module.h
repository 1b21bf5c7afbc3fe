#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

namespace torch::nn {
class Module;
}

namespace fsdp {

class FSDPState;
struct CheckpointOptions;

/// The tensors found in the arguments or results of a forward, to read and to replace.
using TensorRefs = c10::SmallVector<at::Tensor*, 8>;

/// What runs around a module's forward. FSDPState is the one that shards.
class ForwardHooks {
 public:
  virtual ~ForwardHooks() = default;
  /// Before forward; may replace the tensors of the arguments.
  virtual void pre_forward(torch::nn::Module& module, TensorRefs& inputs) = 0;
  /// After forward; may replace the tensors of the result.
  virtual void post_forward(torch::nn::Module& module, TensorRefs& outputs) = 0;
  /// When forward, pre_forward or post_forward threw.
  virtual void forward_threw(torch::nn::Module& module) noexcept = 0;
  /// After the module's to(): its parameters may have other storages, and have lost what they
  /// carry.
  virtual void converted(torch::nn::Module& module) { (void)module; }
  /// Whether the module's dictionary holds this rank's parts of its parameters, not whole ones.
  [[nodiscard]] virtual bool shards() const { return true; }
};

/// Ends an asynchronous unshard. It may be waited for any number of times, or not at all: the
/// module's forward waits too.
class UnshardHandle {
 public:
  explicit UnshardHandle(std::shared_ptr<FSDPState> state) : state_(std::move(state)) {}
  /// Returns when the unsharded parameters are valid.
  void wait();

 private:
  std::shared_ptr<FSDPState> state_;  // null once waited for
};

/// The methods that fully_shard() adds to a module. FSDP_MODULE types derive from it.
///
/// Errors:  every method throws StateError on a module that was never sharded.
/// Source:  PyTorch 2.13, torch.distributed.fsdp.FSDPModule.
class FSDPModule {
 public:
  virtual ~FSDPModule() = default;

  [[nodiscard]] bool is_fully_sharded() const {
    return forward_hooks_ != nullptr && forward_hooks_->shards();
  }

  /// Gathers the module's own parameters (not those of sharded children), and waits for them.
  void unshard();
  /// Starts the gather and returns. Ranks: in the same order among collectives on every rank.
  [[nodiscard]] UnshardHandle unshard_async();
  /// Frees the unsharded parameters.
  void reshard();

  /// false: gradients stay on this rank, unreduced, until a backward with true adds them up.
  void set_requires_gradient_sync(bool requires_gradient_sync, bool recurse = true);
  /// false: reduce over the shard dimension of an HSDP mesh only, and all-reduce later.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);
  /// false: more backwards of this step follow; what is in flight may stay in flight.
  void set_is_last_backward(bool is_last_backward);
  /// true: reduce zeros for parameters without a gradient, also where no parameter of a group that
  /// ran forward has one on this rank, but may have on others. They get zeros as gradients. (Ranks
  /// must still gather alike: what some ranks alone gather in backward is not helped by this.)
  void set_reduce_scatter_unused_params(bool reduce_scatter_unused_params, bool recurse = true);
  void set_reshard_after_forward(bool reshard_after_forward, bool recurse = true);
  void set_reshard_after_backward(bool reshard_after_backward, bool recurse = true);
  /// false: backward does not gather this module's parameters (say, an embedding's).
  void set_unshard_in_backward(bool unshard_in_backward);
  /// Gathers these modules' parameters when this one's forward starts, in this order.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule*>& modules);
  /// The same for backward; a list that is not empty replaces the default prefetch.
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule*>& modules);
  /// Divide gradients by `factor` instead of the number of ranks.
  void set_gradient_divide_factor(double factor);
  /// true: the collectives of this module's gradients only sum, and a division follows. By default
  /// they average, or multiply before they sum, where the backend can.
  void set_force_sum_reduction_for_comms(bool enable);
  /// Calls `hook` with this rank's reduced gradients, 1-D in reduce_dtype, before they are divided
  /// by what the collectives have not divided by, cast and given to the sharded parameters; it
  /// changes them in place. Without replicas it is in the place of an all-reduce (say, over nodes
  /// that this mesh knows nothing of), with replicas behind theirs. Null: none. What lies between
  /// the parameters' gradients is padding: zeros. Streams: the hook runs on `stream`, or the
  /// all-reduce stream, behind the reduction. Ranks:   called for each reduction, in the same order
  /// on every rank. Errors:  ConfigError if a stream is given with replicas, or one of another
  /// device; what the hook
  ///          throws comes out of backward.
  void set_all_reduce_hook(std::function<void(const at::Tensor& reduced)> hook,
                           std::optional<c10::Stream> stream = std::nullopt);
  /// How many groups may have their gradients in flight: above 1 the next group's need not wait
  /// until the reduce-scatter before has read its input, for the memory of one more. The largest
  /// value of the root's groups counts. Errors:  ConfigError below 1.
  void set_reduce_scatter_max_input_buffers(int64_t max_input_buffers, bool recurse = true);
  /// true: reduce-scatters go over a process group of their own, since one communicator does one
  /// collective at a time; modules of one mesh share it. false: over the mesh's, as all-gathers do.
  /// Ranks:   makes process groups: every rank that shards calls it.
  void set_separate_reduce_scatter_group(bool enable = true, bool recurse = true);
  /// For the root: the next forward's gathers wait for `event`, recorded behind the optimizer's
  /// step, and not for all that has been put on the current stream since. Once: each step sets it.
  /// On CPU it changes nothing.
  /// Errors:  ConfigError if the event is of another type of device, or was not recorded.
  void set_post_optim_event(c10::Event event);
  /// Frees the memory that the root keeps for its next gathers and reductions (on CPU: of one
  /// gather and one reduction, if they take 64 KiB or more; elsewhere the device's caching
  /// allocator does).
  void release_buffers();
  /// Drops what a step that threw left behind, on the root. The next forward of the root does so by
  /// itself. Gradients of that step are lost; if its backward threw, so are unsharded gradients of
  /// earlier backwards without sync, to which it may have added in part.
  void reset_iter_state();

  /// The unsharded parameters of this module's group by name, valid while it is unsharded.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> unsharded_parameters() const;

  /// Used by fully_shard().
  void set_forward_hooks(std::shared_ptr<ForwardHooks> hooks) { forward_hooks_ = std::move(hooks); }
  [[nodiscard]] const std::shared_ptr<ForwardHooks>& forward_hooks() const {
    return forward_hooks_;
  }
  /// Used by checkpoint(): forward keeps no activations, as these options say. Null: it keeps them.
  void set_activation_checkpoint(std::shared_ptr<const CheckpointOptions> options) {
    activation_checkpoint_ = std::move(options);
  }
  [[nodiscard]] const std::shared_ptr<const CheckpointOptions>& activation_checkpoint() const {
    return activation_checkpoint_;
  }
  /// The module that this object is.
  [[nodiscard]] virtual torch::nn::Module& as_module() = 0;

 protected:
  FSDPModule() = default;
  // A copy is a module of its own, not sharded.
  FSDPModule(const FSDPModule&) {}
  FSDPModule& operator=(const FSDPModule&) { return *this; }

 private:
  std::shared_ptr<ForwardHooks> forward_hooks_;
  std::shared_ptr<const CheckpointOptions> activation_checkpoint_;
};

}  // namespace fsdp
