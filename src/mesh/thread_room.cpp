#include "mesh/thread_room.h"

#include <algorithm>
#include <utility>

#include "fsdp/error.h"

namespace fsdp {
namespace {

std::string left_text(int job_rank) {
  return c10::str("rank ", job_rank,
                  " has left the job and will not join. Every rank must make the same calls in "
                  "the same order.");
}

}  // namespace

ThreadGroup::ThreadGroup(std::shared_ptr<ThreadRoom> room, std::vector<int> job_ranks)
    : room_(std::move(room)),
      job_ranks_(std::make_shared<const std::vector<int>>(std::move(job_ranks))),
      left_(job_ranks_->size(), 0),
      next_sequence_(job_ranks_->size(), 0),
      num_splits_(job_ranks_->size()) {}

ThreadGroup::OpPtr ThreadGroup::join(int rank, ThreadCall call) {
  OpPtr op;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    FSDP_CHECK(CommError, failure_.empty(), call.name, ": ", failure_);
    const uint64_t sequence = next_sequence_[static_cast<size_t>(rank)]++;
    OpPtr& entry = gathering_[sequence];
    if (!entry) entry = std::make_shared<ThreadOp>(job_ranks_, sequence);
    op = entry;
    op->arrive(rank, std::move(call));
    if (op->all_arrived()) {
      gathering_.erase(sequence);
    } else {
      for (int other = 0; other < size(); ++other) {
        if (left_[static_cast<size_t>(other)] && !op->has_arrived(other)) {
          op->fail(left_text((*job_ranks_)[static_cast<size_t>(other)]));
        }
      }
    }
  }
  op->settle(rank);
  return op;
}

ThreadGroup::OpPtr ThreadGroup::join_pair(int source, int destination, int tag, bool is_sender,
                                          ThreadCall call) {
  OpPtr op;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    FSDP_CHECK(CommError, failure_.empty(), call.name, ": ", failure_);
    Lane& lane = lanes_[{source, destination, tag}];
    std::deque<OpPtr>& of_peer = is_sender ? lane.without_sender : lane.without_receiver;
    if (!of_peer.empty()) {
      op = of_peer.front();
      of_peer.pop_front();
    } else {
      const std::vector<int> pair = {(*job_ranks_)[static_cast<size_t>(source)],
                                     (*job_ranks_)[static_cast<size_t>(destination)]};
      op = std::make_shared<ThreadOp>(std::make_shared<const std::vector<int>>(pair), lane.count++);
      (is_sender ? lane.without_receiver : lane.without_sender).push_back(op);
    }
    op->arrive(is_sender ? 0 : 1, std::move(call));
    const int peer = is_sender ? destination : source;
    if (left_[static_cast<size_t>(peer)] && !op->all_arrived()) {
      op->fail(left_text((*job_ranks_)[static_cast<size_t>(peer)]));
    }
  }
  op->settle(is_sender ? 0 : 1);
  return op;
}

std::shared_ptr<ThreadGroup> ThreadGroup::split(int rank, const std::vector<int>& ranks) {
  std::vector<int> job_ranks;
  for (const int member : ranks) job_ranks.push_back((*job_ranks_)[static_cast<size_t>(member)]);
  const std::lock_guard<std::mutex> lock(mutex_);
  FSDP_CHECK(CommError, failure_.empty(), "split: ", failure_);
  const std::pair key(ranks, num_splits_[static_cast<size_t>(rank)][ranks]++);
  Split& split = splits_[key];
  if (!split.group) split.group = room_->make_group(std::move(job_ranks));
  const std::shared_ptr<ThreadGroup> group = split.group;
  if (++split.num_asked == static_cast<int>(ranks.size())) splits_.erase(key);
  return group;
}

std::vector<ThreadGroup::OpPtr> ThreadGroup::open_ops() const {
  std::vector<OpPtr> ops;
  for (const auto& [sequence, op] : gathering_) ops.push_back(op);
  for (const auto& [key, lane] : lanes_) {
    ops.insert(ops.end(), lane.without_receiver.begin(), lane.without_receiver.end());
    ops.insert(ops.end(), lane.without_sender.begin(), lane.without_sender.end());
  }
  return ops;
}

void ThreadGroup::fail(const std::string& reason) {
  std::vector<OpPtr> ops;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = reason;
    ops = open_ops();
    for (const OpPtr& op : ops) op->fail(reason);
  }
  for (const OpPtr& op : ops) op->settle(0);
}

void ThreadGroup::mark_left(int job_rank) {
  std::vector<OpPtr> failed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find(job_ranks_->begin(), job_ranks_->end(), job_rank);
    if (found == job_ranks_->end()) return;
    const int rank = static_cast<int>(found - job_ranks_->begin());
    left_[static_cast<size_t>(rank)] = 1;
    for (const auto& [sequence, op] : gathering_) {
      if (!op->has_arrived(rank)) failed.push_back(op);
    }
    for (const auto& [key, lane] : lanes_) {
      const auto& [source, destination, tag] = key;
      const std::deque<OpPtr>& orphans =
          destination == rank ? lane.without_receiver : lane.without_sender;
      if (source == rank || destination == rank) {
        failed.insert(failed.end(), orphans.begin(), orphans.end());
      }
    }
    for (const OpPtr& op : failed) op->fail(left_text(job_rank));
  }
  for (const OpPtr& op : failed) op->settle(0);
}

void ThreadGroup::expire(std::chrono::steady_clock::time_point now) {
  std::vector<OpPtr> ops;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ops = open_ops();
    for (const OpPtr& op : ops) op->expire(now);
  }
  for (const OpPtr& op : ops) {
    if (!op->error().empty()) op->settle(0);
  }
}

ThreadRoom::ThreadRoom(int world_size, std::chrono::milliseconds timeout)
    : timeout_(timeout), left_(static_cast<size_t>(world_size), 0) {}

std::shared_ptr<ThreadGroup> ThreadRoom::make_group(std::vector<int> job_ranks) {
  auto group = std::make_shared<ThreadGroup>(shared_from_this(), std::move(job_ranks));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) group->fail(failure_);
  for (const int job_rank : group->job_ranks()) {
    if (left_[static_cast<size_t>(job_rank)]) group->mark_left(job_rank);
  }
  std::erase_if(groups_, [](const auto& other) { return other.expired(); });
  groups_.push_back(group);
  return group;
}

std::vector<std::shared_ptr<ThreadGroup>> ThreadRoom::groups() const {
  std::vector<std::shared_ptr<ThreadGroup>> alive;
  for (const auto& weak : groups_) {
    if (auto group = weak.lock()) alive.push_back(std::move(group));
  }
  return alive;
}

bool ThreadRoom::abort(int job_rank, const std::string& message) {
  std::vector<std::shared_ptr<ThreadGroup>> all;
  std::string reason;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) return false;
    failure_ = reason = c10::str("rank ", job_rank, " failed: ", message);
    all = groups();
  }
  for (const auto& group : all) group->fail(reason);
  return true;
}

void ThreadRoom::leave(int job_rank) {
  std::vector<std::shared_ptr<ThreadGroup>> all;
  std::string failure;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    left_[static_cast<size_t>(job_rank)] = 1;
    failure = failure_;
    all = groups();
  }
  for (const auto& group : all) {
    // An abort may be under way that has not reached this group: then that is the reason.
    if (!failure.empty()) group->fail(failure);
    group->mark_left(job_rank);
  }
}

void ThreadRoom::expire() {
  std::vector<std::shared_ptr<ThreadGroup>> all;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    all = groups();
  }
  const auto now = std::chrono::steady_clock::now();
  for (const auto& group : all) group->expire(now);
}

}  // namespace fsdp
