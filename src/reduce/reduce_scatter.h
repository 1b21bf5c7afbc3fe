#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/stream.h"
#include "reduce/divide_factors.h"
#include "shard/fsdp_param.h"

namespace fsdp {

/// HSDP: the sum over this rank's shard group of reductions that were not all-reduced yet.
struct PartialOutput {
  at::Tensor flat;                 ///< undefined: there is none
  std::vector<FSDPParam*> params;  ///< whose parts lie in it, one after the other
};

/// What one group reduces after its backward.
struct ReduceRequest {
  std::vector<FSDPParam*> params;  ///< those that have a gradient; they outlive the reduction
  std::vector<at::Tensor> grads;   ///< of the whole parameters, in the same order
  FSDPMeshInfoPtr mesh_info;
  c10::Device device = c10::kCPU;
  std::optional<at::ScalarType> reduce_dtype;  ///< unset: the gradients' own
  at::ScalarType orig_dtype = at::kFloat;      ///< of the sharded gradients
  std::optional<double> divide_factor;
  bool all_reduce_grads = true;  ///< HSDP: false keeps a partial sum for a later reduction
  PartialOutput partial_output;  ///< of earlier reductions; its params are among `params`
};

struct ReduceStreams {
  Stream reduce_scatter;
  Stream all_reduce;
};

/// The reduction of one group's gradients: started by the constructor, ended by finish().
///
/// On a device with streams finish() is called at once and only puts work on streams; on CPU it is
/// called when the result is needed, so that the collective overlaps with backward.
/// Source: PyTorch 2.13, _fsdp_collectives.foreach_reduce.
class Reduction {
 public:
  /// Copies the gradients, cut per rank, into the reduce-scatter's input and starts it.
  /// Memory:  one buffer of the gradients' padded bytes in the reduce dtype, until release_input();
  ///          the gradients are freed.
  /// Streams: copy-in on the current stream, the collective on the reduce-scatter stream.
  /// Errors:  ConfigError for a sparse gradient.
  Reduction(ReduceRequest request, const ReduceStreams& streams);

  ~Reduction();
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  /// Ends the reduction: (all-reduce,) division, cast, and the sharded gradients. Once; then no-op.
  /// Errors:  CommError if a collective failed.
  void finish();

  /// Instead of finish(): waits for the collective and drops its result. Never throws.
  void abandon() noexcept;

  [[nodiscard]] bool finished() const { return finished_; }
  /// After finish(): frees the collective's input. The current stream waits for its last use.
  void release_input();
  /// After finish(): the sharded gradients are written.
  [[nodiscard]] const Event& post_reduce() const { return post_reduce_; }
  /// After finish() without all-reduce: the sum over this rank's shard group so far.
  [[nodiscard]] PartialOutput take_partial_output() { return std::move(partial_output_); }

 private:
  void copy_in(const std::vector<at::Tensor>& grads);
  void start(const DivideFactors& factors);
  void add_partial_output();
  bool all_reduce();
  void write_sharded_grads(const Stream& stream);

  std::vector<FSDPParam*> params_;
  FSDPMeshInfoPtr mesh_info_;
  ReduceStreams streams_;
  DivideFactors factors_;
  at::ScalarType orig_dtype_;
  bool all_reduce_grads_;
  PartialOutput partial_output_;
  at::Tensor input_;   // 1-D, rank 0's parts, rank 1's parts, ...
  at::Tensor output_;  // 1-D, this rank's parts
  c10::intrusive_ptr<c10d::Work> work_;
  Event reduce_scatter_done_;
  Event post_reduce_;
  bool finished_ = false;
};

}  // namespace fsdp
