#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/events.h"
#include "fsdp/policy.h"
#include "reduce/grad_buffer.h"
#include "schedule/comm_context.h"
#include "shard/sharded_params.h"
#include "unshard/all_gather.h"

namespace fsdp {

/// What fully_shard() decided for a group, and what the FSDPModule methods change.
struct GroupSettings {
  MixedPrecisionPolicy mp_policy;
  /// Null: stay unsharded after forward. The group's own mesh: reshard. Another: keep a part of it.
  FSDPMeshInfoPtr post_forward_mesh_info;
  bool reduce_grads = true;
  bool all_reduce_grads = true;
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  /// Reduce zeros for parameters without a gradient, also where the whole group has none.
  bool reduce_scatter_unused_params = false;
  bool require_equal_gradients = false;
  std::optional<double> gradient_divide_factor;
  bool force_sum_reduction = false;
  std::function<void(const at::Tensor&)> all_reduce_hook;
  std::optional<Stream> all_reduce_hook_stream;
  /// Of the reductions of all groups of a root, which take the largest of their values.
  size_t reduce_scatter_max_input_buffers = 1;
  ProcessGroupPtr reduce_scatter_group;  ///< of the same ranks as the shard group; null: that one
};

/// The parameters that one fully_shard() call gathers and reduces together, and their state
/// machine.
///
/// One object of one rank's thread. Functions stand in the order of a training step.
/// Source: PyTorch 2.13, torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.
class FSDPParamGroup : public std::enable_shared_from_this<FSDPParamGroup> {
 public:
  FSDPParamGroup(const std::vector<ParamToShard>& params, FSDPMeshInfoPtr mesh_info, Layout layout,
                 c10::Device device, GroupSettings settings);

  /// Resolves the dtypes and takes back sharded parameters that were converted since. May be called
  /// again; the dtypes of a group that has computed already do not change.
  void lazy_init();
  /// Brings sharded parameters that were converted back onto the flat shard, with their labels.
  /// Errors:  StateError if their shape has changed or they are on another device.
  void take_back_sharded_params();
  /// Paths from the root of the modules that are sharded together, this group's number among the
  /// root's, from 1, and the streams and buffers that they share.
  void join_root(const std::vector<std::string>& module_paths, int64_t number,
                 std::shared_ptr<CommContext> comm);

  // Forward -----------------------------------------------------------------------------------
  /// Starts the all-gather, unless the parameters are unsharded or on their way.
  void unshard(bool async_op = false);
  /// Ends it: the unsharded parameters are valid on the compute stream.
  void wait_for_unshard();
  /// Frees the unsharded parameters, or in forward what reshard_after_forward says.
  void reshard();
  /// Returns whether forward was entered anew (and so the inputs get a post-backward node).
  bool pre_forward();
  void post_forward();

  // The steps of the above. Without effect in the state that they lead to. ---------------------
  void to_sharded();
  /// From unsharded: keeps the part of the post-forward mesh. The settings have such a mesh.
  void to_sharded_post_forward();
  /// The parameters were gathered and copied out.
  void to_unsharded();

  // Backward ----------------------------------------------------------------------------------
  void pre_backward(bool default_prefetch);
  /// Reshards, then starts the reduction of the gradients that are there. After a forward of only
  /// some of the modules that are sharded together, waits for it: more such backwards may come.
  void post_backward();
  /// Whether gradients wait that are to be reduced in this backward.
  [[nodiscard]] bool has_unreduced_grads() const;
  /// After the last backward of a step: nothing stays in flight.
  void finalize_backward();
  /// After each backward of the root.
  void leave_backward();

  /// Gathers for another module's turn: in forward, or in backward.
  void prefetch(TrainingState turn);
  /// Where this group stood in the forwards of this iteration, latest first; removes it.
  std::optional<size_t> pop_post_forward_index();
  void clear_post_forward_indices() { post_forward_indices_.clear(); }

  /// Drops what a step that threw left behind; with `drop_unsharded_grads` also the gradients that
  /// its backward may have added to half. Never throws.
  void reset_iteration(bool drop_unsharded_grads) noexcept;

  /// What ranks must agree on, a line for each parameter.
  [[nodiscard]] std::string describe() const;

  [[nodiscard]] TrainingState training_state() const { return training_state_; }
  [[nodiscard]] ShardedState sharded_state() const { return sharded_params_.sharded_state(); }
  [[nodiscard]] bool is_unsharded() const { return sharded_state() == ShardedState::kUnsharded; }
  [[nodiscard]] ShardedParams& sharded_params() { return sharded_params_; }
  [[nodiscard]] std::vector<FSDPParam>& params() { return sharded_params_.params(); }
  [[nodiscard]] GroupSettings& settings() { return settings_; }
  [[nodiscard]] const FSDPMeshInfoPtr& mesh_info() const { return mesh_info_; }
  [[nodiscard]] const std::string& module_path() const { return module_path_; }
  [[nodiscard]] CommContext& comm() { return *comm_; }
  void set_observer(std::shared_ptr<ScheduleObserver> observer) { observer_ = std::move(observer); }

 private:
  void collect_grads_as_they_come();
  void check_sharded_params();
  void check_uniform_dtype() const;
  [[nodiscard]] bool may_be_stale() const;
  void drop_stale_params();
  void drop_gather() noexcept;
  void free_gathered(at::DataPtr bytes, size_t num_bytes);
  [[nodiscard]] bool gathers_follow() const;
  void start_all_gather(bool async_op);
  void record_post_forward();
  void keep_unsharded_grads();
  void take_unsharded_grads();
  [[nodiscard]] bool has_unsharded_grads() const;
  [[nodiscard]] bool may_get_grads() const;
  [[nodiscard]] bool has_partial_output() const;
  void start_reduction();
  void end_reduction();
  void notify(ScheduleEventKind kind, bool changed) const;

  ShardedParams sharded_params_;
  FSDPMeshInfoPtr mesh_info_;
  c10::Device device_;
  GroupSettings settings_;
  std::string module_path_;
  int64_t number_ = 1;
  bool is_list_ = false;
  std::shared_ptr<CommContext> comm_;  // its own until join_root
  std::shared_ptr<ScheduleObserver> observer_;

  TrainingState training_state_ = TrainingState::kIdle;
  bool prefetching_ = false;
  bool was_unsharded_ = false;  // ever
  std::optional<AllGatherResult> all_gather_result_;
  Event reshard_event_;  // of the copy into the post-forward shard
  std::vector<size_t> post_forward_indices_;
  size_t place_in_backward_ = 0;       // how many groups' backwards come after this one's
  bool converted_ = false;             // since the dtypes were resolved
  bool gathered_before_step_ = false;  // gradients were there when the last gather began
  bool reduced_since_gather_ = false;
  std::shared_ptr<GradBuffer> grads_;     // kFlat: the parameters' hooks hold it too, weakly
  std::shared_ptr<Reduction> reduction_;  // the last one
  PartialOutput partial_reduce_output_;   // HSDP without all-reduce
};

}  // namespace fsdp
