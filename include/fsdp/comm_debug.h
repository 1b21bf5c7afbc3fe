#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace fsdp {

/// How often an operation was called, and with how much data.
struct CommCount {
  int64_t calls = 0;
  int64_t bytes = 0;  ///< see CommDebugMode
};

/// Counts the collective operations that this rank's thread asks of any process group while the
/// object is alive. Scopes may be nested; each counts what happens while it is alive.
///
///     fsdp::CommDebugMode comm;
///     loss.backward();
///     comm.count("_reduce_scatter_base_");  // one for each sharded module
///
/// Operations have the names that PyTorch counts them by, those of the c10d operators without the
/// namespace: "_allgather_base_", "_reduce_scatter_base_", "allreduce_", "broadcast_",
/// "allgather_into_tensor_coalesced_", ... Also "barrier", "send" and "recv_", which PyTorch leaves
/// out. What a backend is asked directly, past c10d::ProcessGroup, is not seen.
///
/// Units:   the bytes of a call are those of its inputs or of its outputs, of which there are more:
///          of an all-gather the output, of a reduce-scatter the input. A barrier has none.
/// Threads: of its own thread, and of the backwards that this thread runs, also where autograd runs
///          them on threads of devices. Made and destroyed on one thread.
/// Memory:  without a CommDebugMode nothing is observed, and nothing costs.
/// Source:  PyTorch 2.13, torch.distributed.tensor.debug.CommDebugMode.
class CommDebugMode {
 public:
  using Counts = std::map<std::string, CommCount>;  ///< by operation

  CommDebugMode();
  ~CommDebugMode();
  CommDebugMode(const CommDebugMode&) = delete;
  CommDebugMode& operator=(const CommDebugMode&) = delete;

  /// The calls of one operation; 0 for a name that was not called.
  [[nodiscard]] int64_t count(const std::string& operation) const;
  /// The bytes of all calls of one operation.
  [[nodiscard]] int64_t bytes(const std::string& operation) const;
  /// The calls of all operations.
  [[nodiscard]] int64_t total() const;
  /// The number of operations that were called.
  [[nodiscard]] int64_t num_kinds() const;
  /// All operations that were called.
  [[nodiscard]] Counts counts() const;

  /// All operations by the named range they were called in: the innermost RECORD_USER_SCOPE around
  /// the call, "" for none. Sharded modules name theirs by their path: "FSDP::all_gather
  /// (layers.0)", "FSDP::post_backward_reduce (layers.0)", "FSDP::all_reduce (layers.0)"; the
  /// root's has no path. A range counts from where it begins while an object is alive.
  [[nodiscard]] const std::map<std::string, Counts>& counts_by_range() const { return by_range_; }

  /// Forgets what was counted.
  void reset() { by_range_.clear(); }

 private:
  friend struct CommObserver;

  std::map<std::string, Counts> by_range_;
};

}  // namespace fsdp
