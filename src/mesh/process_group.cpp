#include "fsdp/process_group.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/RankLocal.hpp>

#include "fsdp/error.h"
#include "mesh/hccl_backend.h"
#include "mesh/job_group.h"
#include "mesh/thread_backend.h"

namespace fsdp {
namespace {

constexpr std::chrono::milliseconds kExpiryCheck{200};

struct DefaultGroup {
  ProcessGroupPtr group;
};

// The default group of a rank also for autograd's threads that work for it.
ProcessGroupPtr& default_group_of_this_rank() { return c10d::RankLocal<DefaultGroup>::get().group; }

// The rank threads of one run_ranks call.
class RankThreads {
 public:
  RankThreads(int world_size, const std::function<void(const ProcessGroupPtr&)>& body,
              const RunRanksOptions& options)
      : body_(body),
        room_(std::make_shared<ThreadRoom>(world_size, options.timeout)),
        world_(room_->make_group(all_ranks(world_size))),
        num_running_(world_size) {}

  void run() {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_->size(); ++rank) {
      try {
        threads.emplace_back([this, rank] { run_rank(rank); });
      } catch (const std::system_error& error) {
        report(rank, c10::str("no thread for it: ", error.what()));
        retire(rank);
      }
    }
    {
      std::unique_lock<std::mutex> lock(mutex_);
      while (!finished_.wait_for(lock, kExpiryCheck, [this] { return num_running_ == 0; })) {
        lock.unlock();
        room_->expire();
        lock.lock();
      }
    }
    for (std::thread& thread : threads) thread.join();
    if (first_error_) std::rethrow_exception(first_error_);
  }

 private:
  static std::vector<int> all_ranks(int world_size) {
    std::vector<int> ranks(static_cast<size_t>(world_size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  void run_rank(int rank) {
    pthread_setname_np(pthread_self(), c10::str("rank ", rank).c_str());  // for debuggers, reports
    try {
      at::set_num_threads(1);
      // Autograd's device threads would make ranks wait for each other; backward stays here.
      c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
      JobGroup::Options options;
      options.backend = c10::make_intrusive<ThreadBackend>(world_, rank);
      options.job_ranks = world_->job_ranks();
      options.store = store_;
      options.name = "world";
      const ProcessGroupPtr group = c10::make_intrusive<JobGroup>(std::move(options));
      set_default_process_group(group);
      body_(group);
    } catch (const std::exception& error) {
      report(rank, message_of(error));
    } catch (...) {
      report(rank, "an exception that is not a std::exception");
    }
    set_default_process_group(nullptr);
    retire(rank);
  }

  void retire(int rank) {
    room_->leave(rank);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--num_running_ == 0) finished_.notify_all();
  }

  // Called inside of a catch block.
  void report(int rank, const std::string& message) {
    const std::exception_ptr error = std::current_exception();
    if (!room_->abort(rank, message)) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    first_error_ = error;
  }

  const std::function<void(const ProcessGroupPtr&)>& body_;
  const std::shared_ptr<ThreadRoom> room_;
  const std::shared_ptr<ThreadGroup> world_;
  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex_;  // guards all below
  std::condition_variable finished_;
  int num_running_;
  std::exception_ptr first_error_;
};

}  // namespace

void set_default_process_group(ProcessGroupPtr group) {
  default_group_of_this_rank() = std::move(group);
}

ProcessGroupPtr default_process_group() {
  ProcessGroupPtr group = default_group_of_this_rank();
  FSDP_CHECK(StateError, group,
             "default_process_group: this thread has no process group. Call "
             "init_process_group() first, or run inside of run_ranks().");
  return group;
}

void destroy_process_group() {
  const auto* group = dynamic_cast<const JobGroup*>(default_group_of_this_rank().get());
  const bool has_npu = group != nullptr && group->has_npu();
  set_default_process_group(nullptr);
  if (has_npu) end_npu();
}

ProcessGroupPtr new_group(const ProcessGroupPtr& parent, const std::vector<int>& ranks) {
  auto* group = dynamic_cast<JobGroup*>(parent.get());
  FSDP_CHECK(ConfigError, group != nullptr,
             "new_group: the parent was not made by init_process_group, run_ranks or new_group.");
  FSDP_CHECK(ConfigError, !ranks.empty(), "new_group: no ranks given.");
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    FSDP_CHECK(ConfigError, sorted[i] >= 0 && sorted[i] < group->getSize(), "new_group: rank ",
               sorted[i], " is not a rank of the parent, which has ", group->getSize(), ".");
    FSDP_CHECK(ConfigError, i == 0 || sorted[i] != sorted[i - 1], "new_group: rank ", sorted[i],
               " is given twice.");
  }
  return group->split(ranks);
}

void run_ranks(int world_size, const std::function<void(const ProcessGroupPtr&)>& body,
               const RunRanksOptions& options) {
  FSDP_CHECK(ConfigError, world_size >= 1, "run_ranks: the world size must be at least 1, found ",
             world_size, ".");
  const int num_threads = at::get_num_threads();  // a rank's setting is also that of new threads
  try {
    RankThreads(world_size, body, options).run();
  } catch (...) {
    at::set_num_threads(num_threads);
    throw;
  }
  at::set_num_threads(num_threads);
}

}  // namespace fsdp
