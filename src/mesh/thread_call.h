#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "base/stream.h"

namespace fsdp {

enum class CallKind {
  kBarrier,
  kBroadcast,
  kAllReduce,
  kReduce,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kPointToPoint,
};

/// A dtype and a number of elements: what ranks compare.
struct Extent {
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  friend bool operator==(const Extent&, const Extent&) = default;
};

/// A contiguous range of a rank's memory, on the host or on a device.
struct Piece {
  std::byte* data = nullptr;
  Extent extent;
  c10::Device device = c10::Device(c10::kCPU);

  [[nodiscard]] int64_t bytes() const;
  /// The elements [begin, end).
  [[nodiscard]] Piece slice(int64_t begin, int64_t end) const;
};

/// How a call on a device with streams is ordered with the rest of its rank's work.
struct DeviceCall {
  c10::Device device;
  Stream stream;            ///< this rank's share of the work runs here
  Event ready;              ///< on the caller's stream: the tensors may be used
  std::vector<Event> done;  ///< of this rank's share, by phase
  at::Tensor scratch;
};

/// What one rank asked for: one collective, reduced to pieces of memory.
///
/// Lists and flat buffers look alike here. With n ranks, tensor k of an all-gather is outputs
/// [k * n, (k + 1) * n), and of a reduce-scatter inputs [k * n, (k + 1) * n).
struct ThreadCall {
  std::string name;
  CallKind kind = CallKind::kBarrier;
  std::vector<Piece> inputs;
  std::vector<Piece> outputs;
  std::vector<Extent> extents;  // must be the same on all ranks
  int root = -1;                // of the group; -1 where there is none
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::UNUSED;
  double factor = 1;  // of PREMUL_SUM
  /// The outputs lie in inputs that other ranks still read: write to `scratch` first.
  bool through_scratch = false;
  std::unique_ptr<std::byte[]> scratch;
  std::chrono::milliseconds timeout{0};
  std::vector<at::Tensor> tensors;        // kept alive until all ranks are done with them
  std::shared_ptr<DeviceCall> on_device;  // null for tensors of the host

  [[nodiscard]] c10::DeviceType device_type() const;
};

/// "allreduce with 12 elements of Float, SUM"
[[nodiscard]] std::string describe(const ThreadCall& call);

/// Whether two ranks asked for the same; per-pair sizes are compared by pairs_agree().
[[nodiscard]] bool calls_agree(const ThreadCall& a, const ThreadCall& b);

/// For all-to-all: what `from` sends to `to` is what `to` expects from it.
[[nodiscard]] bool pairs_agree(const ThreadCall& from, int from_rank, const ThreadCall& to,
                               int to_rank);

/// How many times all ranks' jobs have to be run: the jobs of one phase may run in any order and at
/// the same time, and those of the next only when all of them are done.
[[nodiscard]] int num_phases(std::span<const ThreadCall> calls);

/// Bytes read and written by all jobs, roughly.
[[nodiscard]] int64_t cost_in_bytes(std::span<const ThreadCall> calls);

/// Does the share of `rank` in one phase. On a device: puts it on the rank's stream, behind all
/// ranks' calls, or their shares of the phase before.
void run_job(std::span<ThreadCall> calls, int phase, int rank);

}  // namespace fsdp
