#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "mesh/thread_room.h"

namespace fsdp {

/// A c10d backend whose ranks are threads of this process: a collective is a copy from the peers'
/// memory, a reduction one pass over it in rank order, so results are the same bits every time.
///
/// Every call returns at once; see ThreadOp for who does the work. A send waits for its receive.
/// Shapes:  tensors are contiguous; flat forms as in c10d. An all-gather may have its own slice of
/// the
///          output as input, a reduce-scatter any part of its input as output.
/// Streams: tensors of one call are all on the host, or all on one device. Ranks may share a
/// device,
///          also its default stream. A call on a device comes behind what its rank's current stream
///          has then, and runs on a stream of this backend's; wait() orders the current stream
///          behind it and lets the host go on. A barrier is one of the hosts.
/// Threads: the calls of one rank come from one thread at a time.
/// Errors:  ConfigError for what this rank alone does wrong (before anything is done); CommError
///          when ranks call different things, a rank does not come in time, has left or has failed.
class ThreadBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  ThreadBackend(std::shared_ptr<ThreadGroup> group, int rank);

  const std::string getBackendName() const override { return "thread"; }
  bool supportsSplitting() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  uint64_t getSequenceNumberForGroup() override { return num_calls_; }
  void setSequenceNumberForGroup() override {}
  /// Makes all ranks of the job fail with "rank R failed: aborted".
  void abort() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  /// The backend of `ranks`; null if this rank is not among them. The store is not used.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;

 private:
  [[nodiscard]] ThreadCall new_call(std::string name, CallKind kind,
                                    std::chrono::milliseconds timeout) const;
  void check_root(const ThreadCall& call, int64_t root) const;
  WorkPtr reduce_in_place(ThreadCall call, const Tensors& tensors, const c10d::ReduceOp& op);
  WorkPtr all_gather_flat(std::string name, const Tensors& outputs, const Tensors& inputs,
                          std::chrono::milliseconds timeout);
  WorkPtr all_gather_lists(std::string name, const TensorLists& outputs, const Tensors& inputs,
                           std::chrono::milliseconds timeout);
  WorkPtr reduce_scatter_flat(std::string name, const Tensors& outputs, const Tensors& inputs,
                              const c10d::ReduceScatterOptions& options);
  [[nodiscard]] std::shared_ptr<DeviceCall> on_device(const ThreadCall& call);
  WorkPtr issue(ThreadCall call, Tensors results);
  WorkPtr issue_pair(ThreadCall call, int source, int destination, int tag, Tensors results);

  const std::shared_ptr<ThreadGroup> group_;
  std::chrono::milliseconds timeout_;
  uint64_t num_calls_ = 0;
  std::unordered_map<c10::Device, Stream> streams_;  // of each device that this rank has used
};

}  // namespace fsdp
