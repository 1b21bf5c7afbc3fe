#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include "mesh/thread_call.h"

namespace fsdp {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// One collective of one group of rank threads, from the first rank's call to the last one's wait.
///
/// There are no worker threads. Once all ranks have arrived, each rank's share is a job, and
/// whoever waits runs first its own job and then those that nobody has begun. So no rank ever
/// waits for a job that nobody runs, in whatever order ranks wait for their collectives.
///
/// On a device a job puts its work on its rank's stream, and the last rank to arrive runs them all:
/// the host never waits for a device. wait() makes the caller's current stream wait.
///
/// Memory:  the tensors of a call on a device are kept until its rank has waited. Those of a rank
///          that never does are kept back by the allocator (record_stream) until the device is
///          done.
/// Threads: every function may be called by every thread.
class ThreadOp {
 public:
  using RankList = std::shared_ptr<const std::vector<int>>;

  /// `job_ranks`: the ranks of the group by their number in the job, for messages.
  ThreadOp(RankList job_ranks, uint64_t sequence);
  ~ThreadOp();
  ThreadOp(const ThreadOp&) = delete;
  ThreadOp& operator=(const ThreadOp&) = delete;

  /// Enters a rank's call. Must be followed by settle(), outside of the caller's locks.
  void arrive(int rank, ThreadCall call);
  /// Ends the operation with an error unless all ranks are there. Followed by settle().
  void fail(const std::string& reason);
  /// Ends it with "ranks ... <reason>" if it is older than its timeout and somebody holds a future
  /// of it, which has no timeout of its own. Followed by settle().
  void expire(std::chrono::steady_clock::time_point now);
  /// Wakes those who wait, completes futures, and does the work that need not wait for a wait().
  void settle(int rank);

  [[nodiscard]] bool all_arrived() const;
  [[nodiscard]] bool has_arrived(int rank) const;

  /// Returns when no rank reads or writes the tensors of this operation any more; on a device, when
  /// what comes later on the current stream runs behind that.
  ///
  /// Errors:  CommError for a rank that does not come within `timeout`, a mismatch, or fail().
  void wait(int rank, std::chrono::milliseconds timeout);
  /// Whether it is over, with or without error; on a device, whether the device is done with it.
  /// Works on jobs that can be done now.
  [[nodiscard]] bool poll(int rank);
  [[nodiscard]] bool succeeded() const;
  [[nodiscard]] std::string error() const;  // empty while there is none
  /// Completes with `value` when the operation ends, also if this rank never waits; is complete on
  /// return if it has ended.
  [[nodiscard]] FuturePtr future(int rank, std::vector<at::Tensor> value);
  [[nodiscard]] uint64_t sequence() const { return sequence_; }

 private:
  enum class State { kGathering, kRunning, kComplete, kFailed };
  struct Promise {
    int rank = 0;
    FuturePtr future;
    std::vector<at::Tensor> value;
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;  // of tensors on a device
  };

  void check_against_first(int rank);   // holds mutex_
  void begin_running();                 // holds mutex_
  void set_failed(std::string reason);  // holds mutex_
  void begin_phase(int phase);          // holds mutex_
  void finish_job();
  void run_available_jobs(int rank);
  [[nodiscard]] bool take_job(int phase, int rank);
  [[nodiscard]] bool is_over() const;
  [[nodiscard]] size_t last_phase() const { return static_cast<size_t>(num_phases_ - 1); }
  [[nodiscard]] std::string label(int rank) const;  // holds mutex_
  [[nodiscard]] std::string missing_ranks() const;  // holds mutex_
  [[nodiscard]] std::string timeout_text(std::chrono::milliseconds timeout) const;
  void order_behind(const Stream& stream) const;
  void let_go_of_tensors(int rank);
  void fulfil_promises();
  void fulfil(Promise promise) const;

  const RankList job_ranks_;
  const uint64_t sequence_;
  const int num_ranks_;
  const std::chrono::steady_clock::time_point created_ = std::chrono::steady_clock::now();

  mutable std::mutex mutex_;  // guards all below but the atomics; calls_ only until kRunning
  std::condition_variable changed_;
  std::vector<ThreadCall> calls_;
  std::vector<char> arrived_;
  int num_arrived_ = 0;
  int first_ = -1;  // the rank that came first: the others are compared with it
  std::string error_;
  std::string job_error_;
  std::vector<Promise> promises_;

  std::atomic<State> state_ = State::kGathering;
  std::atomic<bool> eager_ = false;  // run jobs on arrival: small, or somebody holds a future
  std::unique_ptr<std::atomic<bool>[]> taken_;  // [phase * num_ranks + rank]
  std::atomic<int> phase_ = 0;
  std::atomic<int> num_untaken_ = 0;  // jobs of this phase that nobody has begun
  std::atomic<int> num_unfinished_ = 0;
  int num_phases_ = 0;
};

}  // namespace fsdp
