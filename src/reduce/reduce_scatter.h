#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/stream.h"
#include "reduce/divide_factors.h"
#include "reduce/grad_buffer.h"

namespace fsdp {

/// HSDP: the sum over this rank's shard group of reductions that were not all-reduced yet.
struct PartialOutput {
  at::Tensor flat;  ///< a chunk of `layout`; undefined: there is none
  std::shared_ptr<const GradLayout> layout;
  std::vector<char> has_grad;  ///< of each slot, on this rank, in any of them
};

/// What one group reduces after its backward.
struct ReduceRequest {
  ReduceInput input;  ///< its parameters outlive the reduction
  FSDPMeshInfoPtr mesh_info;
  ProcessGroupPtr reduce_scatter_group;  ///< null: the mesh's shard group
  std::optional<double> divide_factor;
  bool force_sum = false;  ///< no AVG or PREMUL_SUM in the collectives
  std::function<void(const at::Tensor&)> all_reduce_hook;  ///< see FSDPModule::set_all_reduce_hook
  std::optional<Stream> all_reduce_hook_stream;            ///< unset: the all-reduce stream
  bool all_reduce_grads = true;      ///< HSDP: false keeps a partial sum for a later reduction
  bool require_equal_grads = false;  ///< throw if only some ranks have a parameter's gradient
  PartialOutput partial_output;      ///< of earlier reductions
  std::string module_path;           ///< for profilers
};

struct ReduceStreams {
  Stream reduce_scatter;
  Stream all_reduce;
};

/// The reduction of one group's gradients: started by the constructor, ended by finish(). Made by
/// foreach_reduce().
class Reduction {
 public:
  /// Starts the reduce-scatter; see foreach_reduce().
  Reduction(ReduceRequest request, const ReduceStreams& streams);

  ~Reduction();
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  /// Ends the reduction: (all-reduce,) division, cast, and the sharded gradients, of the parameters
  /// that any rank has a gradient for. Once; then no-op.
  /// Errors:  CommError if a collective failed; StateError on every rank if the request requires
  ///          ranks to have the same gradients, and they do not; StateError if another rank reduced
  ///          another group at this time (on a device with streams, and in dtypes too short to
  ///          tell, that goes unnoticed).
  void finish();

  /// Instead of finish(): waits for the collective and drops its result. Never throws.
  void abandon() noexcept;

  [[nodiscard]] bool finished() const { return finished_; }
  /// Whether finish() would wait for no other rank.
  [[nodiscard]] bool is_ready() const {
    return finished_ || ((!work_ || work_->isCompleted()) && !mesh_info_->replicate_mesh_dim);
  }
  /// After finish(): frees the collective's input. The current stream waits for its last use.
  void release_input();
  /// After finish(): the sharded gradients are written.
  [[nodiscard]] const Event& post_reduce() const { return post_reduce_; }
  /// Whether take_partial_output() will give something, once: not all-reduced.
  [[nodiscard]] bool has_partial_output() const {
    return mesh_info_->replicate_mesh_dim && !all_reduce_grads_;
  }
  /// After finish() without all-reduce: the sum over this rank's shard group so far.
  [[nodiscard]] PartialOutput take_partial_output() { return std::move(partial_output_); }

 private:
  void start(const DivideFactors& factors);
  bool all_reduce();
  void run_all_reduce_hook();
  void write_sharded_grads(const Stream& stream);
  void add_partial_output();
  [[nodiscard]] const float* reduced_flags();
  void check_equal_grads();
  void look_at_other_ranks();

  std::shared_ptr<const GradLayout> layout_;
  std::vector<char> has_grad_;  // of each slot
  int64_t group_number_;
  FSDPMeshInfoPtr mesh_info_;
  ProcessGroupPtr group_;  // of the reduce-scatter
  ReduceStreams streams_;
  DivideFactors factors_;
  std::shared_ptr<BufferPool> pool_;
  std::string module_path_;
  bool all_reduce_grads_;
  bool require_equal_grads_;
  std::function<void(const at::Tensor&)> all_reduce_hook_;
  PartialOutput partial_output_;
  at::Tensor input_;          // 1-D, all chunks
  at::Tensor output_;         // 1-D, this rank's chunk
  at::Tensor host_flags_;     // where the output is not float on the CPU
  at::Tensor added_partial_;  // of a shard group of one rank: read by the reduce-scatter stream
  c10::intrusive_ptr<c10d::Work> work_;
  Event reduce_scatter_done_;
  Event post_reduce_;
  bool finished_ = false;
};

/// Starts the reduction of one group's gradients: reduce-scatter (all-reduce, hook,) division,
/// cast, and the sharded gradients.
///
/// On a device with streams it is finished on return: all work is on the streams. On CPU finish()
/// is called when the result is needed, so that the collective overlaps with backward.
/// Memory:  keeps the request's input until release_input().
/// Streams: the reduce-scatter stream waits for the current one, on which the input was written.
///          The caller waits for post_reduce(), and keeps the result until then.
/// Ranks:   one reduce-scatter over the shard mesh, none with one rank; one all-reduce with
///          replicas, unless the request keeps a partial sum.
/// Errors:  StateError if the partial output is of other parameters; those of finish().
/// Source:  PyTorch 2.13, _fsdp_collectives.foreach_reduce.
[[nodiscard]] std::shared_ptr<Reduction> foreach_reduce(ReduceRequest request,
                                                        const ReduceStreams& streams);

}  // namespace fsdp
