#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "mesh/thread_op.h"

namespace fsdp {

class ThreadRoom;

/// What the rank threads of one process group share: which collective each of them has reached.
///
/// Ranks here are ranks of this group; messages name ranks of the job.
class ThreadGroup {
 public:
  using OpPtr = std::shared_ptr<ThreadOp>;

  ThreadGroup(std::shared_ptr<ThreadRoom> room, std::vector<int> job_ranks);

  /// Enters the next collective of `rank`.
  ///
  /// Errors:  CommError if the job has failed.
  [[nodiscard]] OpPtr join(int rank, ThreadCall call);
  /// Enters a send (`is_sender`) or a receive. In the result the sender is rank 0, the receiver 1.
  [[nodiscard]] OpPtr join_pair(int source, int destination, int tag, bool is_sender,
                                ThreadCall call);
  /// The group of `ranks` (of this group); the same one for all ranks that ask with the same list.
  [[nodiscard]] std::shared_ptr<ThreadGroup> split(int rank, const std::vector<int>& ranks);

  [[nodiscard]] int size() const { return static_cast<int>(job_ranks_->size()); }
  [[nodiscard]] const std::vector<int>& job_ranks() const { return *job_ranks_; }
  [[nodiscard]] ThreadRoom& room() const { return *room_; }

  void fail(const std::string& reason);
  void mark_left(int job_rank);
  void expire(std::chrono::steady_clock::time_point now);

 private:
  // Sends and receives between two ranks with one tag that wait for the other side.
  struct Lane {
    std::deque<OpPtr> without_receiver;
    std::deque<OpPtr> without_sender;
    uint64_t count = 0;
  };
  struct Split {
    std::shared_ptr<ThreadGroup> group;
    int num_asked = 0;
  };

  [[nodiscard]] std::vector<OpPtr> open_ops() const;  // holds mutex_

  const std::shared_ptr<ThreadRoom> room_;
  const ThreadOp::RankList job_ranks_;

  std::mutex mutex_;  // guards all below
  std::string failure_;
  std::vector<char> left_;
  std::vector<uint64_t> next_sequence_;              // by rank
  std::map<uint64_t, OpPtr> gathering_;              // collectives that not all ranks have reached
  std::map<std::tuple<int, int, int>, Lane> lanes_;  // by source, destination, tag
  std::map<std::pair<std::vector<int>, uint64_t>, Split> splits_;
  std::vector<std::map<std::vector<int>, uint64_t>> num_splits_;  // by rank
};

/// One job whose ranks are threads of this process: how an error of one reaches all the others.
class ThreadRoom : public std::enable_shared_from_this<ThreadRoom> {
 public:
  ThreadRoom(int world_size, std::chrono::milliseconds timeout);

  [[nodiscard]] std::shared_ptr<ThreadGroup> make_group(std::vector<int> job_ranks);
  /// Ends all collectives that still wait for a rank, and all later ones, in every group, with
  /// "rank R failed: message". Only the first call counts; true for that one.
  bool abort(int job_rank, const std::string& message);
  /// The rank will make no more calls: those that wait for it get an error.
  void leave(int job_rank);
  /// Ends collectives that are past their timeout and that only futures wait for.
  void expire();

  [[nodiscard]] std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  [[nodiscard]] std::vector<std::shared_ptr<ThreadGroup>> groups() const;  // holds mutex_

  const std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;  // guards all below
  std::vector<std::weak_ptr<ThreadGroup>> groups_;
  std::string failure_;
  std::vector<char> left_;
};

}  // namespace fsdp
