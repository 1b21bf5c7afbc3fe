#include "mesh/thread_op.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "fsdp/error.h"

namespace fsdp {
namespace {

constexpr int64_t kSmallBytes = 128 * 1024;  // done by the last rank to arrive: cheaper than waking
// To sleep and be woken takes as long.
constexpr std::chrono::microseconds kSpinTime(50);

int num_cores() {
  const unsigned cores = std::thread::hardware_concurrency();
  return cores == 0 ? 1 : static_cast<int>(cores);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether it came true.
template <typename Condition>
bool spin_until(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 32; ++i) {
      if (condition()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

ThreadOp::ThreadOp(RankList job_ranks, uint64_t sequence)
    : job_ranks_(std::move(job_ranks)),
      sequence_(sequence),
      num_ranks_(static_cast<int>(job_ranks_->size())),
      calls_(job_ranks_->size()),
      arrived_(job_ranks_->size(), 0) {}

// Also when a share failed: those of other ranks may be on their streams.
ThreadOp::~ThreadOp() {
  if (num_phases_ == 0) return;
  for (const ThreadCall& call : calls_) {
    if (!call.on_device) continue;
    const c10::impl::VirtualGuardImpl guard(call.device_type());
    for (const at::Tensor& tensor : call.tensors) {
      for (const ThreadCall& reader : calls_) {
        guard.recordDataPtrOnStream(tensor.storage().data_ptr(), reader.on_device->stream.raw());
      }
    }
  }
}

bool ThreadOp::is_over() const {
  const State state = state_.load(std::memory_order_acquire);
  return state == State::kComplete || state == State::kFailed;
}

bool ThreadOp::all_arrived() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_arrived_ == num_ranks_;
}

bool ThreadOp::has_arrived(int rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return arrived_[static_cast<size_t>(rank)] != 0;
}

std::string ThreadOp::label(int rank) const {
  return c10::str("rank ", (*job_ranks_)[static_cast<size_t>(rank)]);
}

std::string ThreadOp::missing_ranks() const {
  std::string list;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (arrived_[static_cast<size_t>(rank)]) continue;
    list += c10::str(list.empty() ? "" : ", ", (*job_ranks_)[static_cast<size_t>(rank)]);
  }
  return "[" + list + "]";
}

void ThreadOp::arrive(int rank, ThreadCall call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t slot = static_cast<size_t>(rank);
  TORCH_INTERNAL_ASSERT(!arrived_[slot], "a rank entered one collective twice");
  arrived_[slot] = 1;
  ++num_arrived_;
  if (state_ != State::kGathering) return;  // failed already; the caller learns it when it waits
  calls_[slot] = std::move(call);
  if (first_ < 0) first_ = rank;
  check_against_first(rank);
  if (state_ == State::kGathering && num_arrived_ == num_ranks_) begin_running();
}

void ThreadOp::check_against_first(int rank) {
  const ThreadCall& expected = calls_[static_cast<size_t>(first_)];
  const ThreadCall& found = calls_[static_cast<size_t>(rank)];
  if (calls_agree(expected, found)) return;
  set_failed(c10::str("collective ", sequence_, ": ", label(rank), " called ", describe(found),
                      ", ", label(first_), " called ", describe(expected),
                      ". Every rank must make the same calls in the same order."));
}

void ThreadOp::begin_running() {
  if (calls_[0].kind == CallKind::kAllToAll) {
    for (int from = 0; from < num_ranks_; ++from) {
      for (int to = 0; to < num_ranks_; ++to) {
        const ThreadCall& sender = calls_[static_cast<size_t>(from)];
        const ThreadCall& receiver = calls_[static_cast<size_t>(to)];
        if (pairs_agree(sender, from, receiver, to)) continue;
        const Extent sent = sender.inputs[static_cast<size_t>(to)].extent;
        const Extent expected = receiver.outputs[static_cast<size_t>(from)].extent;
        return set_failed(c10::str("collective ", sequence_, ": ", label(from), " called ",
                                   sender.name, " with ", sent.numel, " elements of ", sent.dtype,
                                   " for ", label(to), ", which expects ", expected.numel,
                                   " elements of ", expected.dtype, " from it."));
      }
    }
  }
  num_phases_ = num_phases(calls_);
  taken_ = std::make_unique<std::atomic<bool>[]>(static_cast<size_t>(num_phases_ * num_ranks_));
  if (num_ranks_ == 1 || calls_[0].on_device || cost_in_bytes(calls_) <= kSmallBytes) eager_ = true;
  begin_phase(0);
}

void ThreadOp::begin_phase(int phase) {
  if (!job_error_.empty()) return set_failed(job_error_);
  if (phase == num_phases_) {
    for (ThreadCall& call : calls_) {
      if (!call.on_device) call = ThreadCall();  // lets go of the tensors
    }
    state_.store(State::kComplete, std::memory_order_release);
    return;
  }
  num_unfinished_ = num_ranks_;
  num_untaken_ = num_ranks_;
  phase_.store(phase, std::memory_order_release);  // from here on others may take jobs
  state_.store(State::kRunning, std::memory_order_release);
}

void ThreadOp::set_failed(std::string reason) {
  error_ = std::move(reason);
  state_.store(State::kFailed, std::memory_order_release);
}

void ThreadOp::fail(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::kGathering) set_failed(reason);
}

std::string ThreadOp::timeout_text(std::chrono::milliseconds timeout) const {
  const std::string what =
      first_ < 0 ? "collective" : describe(calls_[static_cast<size_t>(first_)]);
  return c10::str(what, " (collective ", sequence_, " of a group of ", num_ranks_,
                  " ranks): ranks ", missing_ranks(), " did not join within ", timeout.count(),
                  " ms. Every rank must make the same calls in the same order.");
}

void ThreadOp::expire(std::chrono::steady_clock::time_point now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != State::kGathering || promises_.empty() || first_ < 0) return;
  const std::chrono::milliseconds timeout = calls_[static_cast<size_t>(first_)].timeout;
  if (now - created_ > timeout) set_failed(timeout_text(timeout));
}

void ThreadOp::settle(int rank) {
  if (state_.load(std::memory_order_acquire) == State::kRunning) {
    if (eager_) return run_available_jobs(rank);
    // Those that are woken take the jobs; the others sleep on until all is done.
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int i = 0; i < std::min(num_cores(), num_ranks_); ++i) changed_.notify_one();
  } else if (is_over()) {
    fulfil_promises();
  }
}

void ThreadOp::fulfil_promises() {
  std::vector<Promise> promises;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    promises.swap(promises_);
    changed_.notify_all();
  }
  for (Promise& promise : promises) fulfil(std::move(promise));
}

void ThreadOp::fulfil(Promise promise) const {
  if (succeeded()) {
    // On a device a future keeps the current stream's place: whoever waits for it waits for that.
    const std::shared_ptr<DeviceCall>& call = calls_[static_cast<size_t>(promise.rank)].on_device;
    if (!call) return promise.future->markCompleted(c10::IValue(std::move(promise.value)));
    const c10::DeviceGuard on_device(call->device);  // callbacks will have it as theirs
    const StreamGuard on_stream(call->stream);
    order_behind(call->stream);
    promise.future->markCompleted(c10::IValue(std::move(promise.value)),
                                  std::move(promise.storages));
  } else {
    promise.future->setError(std::make_exception_ptr(
        CommError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, error())));
  }
}

bool ThreadOp::take_job(int phase, int rank) {
  std::atomic<bool>& taken = taken_[static_cast<size_t>(phase * num_ranks_ + rank)];
  if (taken.load(std::memory_order_relaxed) || taken.exchange(true)) return false;
  num_untaken_.fetch_sub(1);
  return true;
}

void ThreadOp::run_available_jobs(int rank) {
  while (state_.load(std::memory_order_acquire) == State::kRunning) {
    const int phase = phase_.load(std::memory_order_acquire);
    for (int i = 0; i < num_ranks_; ++i) {
      const int job = (rank + i) % num_ranks_;
      if (!take_job(phase, job)) continue;
      try {
        run_job(calls_, phase, job);
      } catch (const std::exception& error) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (job_error_.empty()) {
          job_error_ = c10::str(describe(calls_[static_cast<size_t>(job)]), " (collective ",
                                sequence_, "), the part of ", label(job), ": ", message_of(error));
        }
      }
      finish_job();
    }
    if (phase_.load(std::memory_order_acquire) == phase) return;  // others are still at it, or over
  }
}

void ThreadOp::finish_job() {
  if (num_unfinished_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    begin_phase(phase_ + 1);
    if (!is_over()) {
      for (int i = 1; i < std::min(num_cores(), num_ranks_); ++i) changed_.notify_one();
    }
  }
  if (is_over()) fulfil_promises();
}

void ThreadOp::wait(int rank, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const auto progress = [&] { return is_over() || num_untaken_.load() > 0; };
  while (!is_over()) {
    if (state_ == State::kRunning) run_available_jobs(rank);
    // While a core is free for each rank, the others are at work, or on their way.
    if (num_ranks_ <= num_cores() && spin_until(progress)) continue;
    std::unique_lock<std::mutex> lock(mutex_);
    if (state_ != State::kGathering) {
      changed_.wait(lock, progress);
    } else if (!changed_.wait_until(lock, deadline, progress) && state_ == State::kGathering) {
      set_failed(timeout_text(timeout));
      lock.unlock();
      fulfil_promises();
    }
  }
  FSDP_CHECK(CommError, succeeded(), error());
  const std::shared_ptr<DeviceCall>& mine = calls_[static_cast<size_t>(rank)].on_device;
  if (mine) order_behind(current_stream(mine->device));
  let_go_of_tensors(rank);  // other ranks may keep their Work, and so this operation, for long
}

// The stream waits for every rank's share: they read each other's tensors.
void ThreadOp::order_behind(const Stream& stream) const {
  for (const ThreadCall& call : calls_) {
    if (num_phases_ > 0) stream.wait(call.on_device->done[last_phase()]);
  }
}

void ThreadOp::let_go_of_tensors(int rank) {
  std::vector<at::Tensor> tensors;  // freed outside of the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  tensors.swap(calls_[static_cast<size_t>(rank)].tensors);
}

bool ThreadOp::poll(int rank) {
  if (state_.load(std::memory_order_acquire) == State::kRunning) run_available_jobs(rank);
  if (!is_over()) return false;
  return !succeeded() || std::all_of(calls_.begin(), calls_.end(), [&](const ThreadCall& call) {
    return num_phases_ == 0 || !call.on_device || call.on_device->done[last_phase()].query();
  });
}

bool ThreadOp::succeeded() const {
  return state_.load(std::memory_order_acquire) == State::kComplete;
}

std::string ThreadOp::error() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

FuturePtr ThreadOp::future(int rank, std::vector<at::Tensor> value) {
  std::unique_lock<std::mutex> lock(mutex_);
  const ThreadCall& call = calls_[static_cast<size_t>(rank)];
  std::vector<c10::Device> devices;
  if (call.on_device) devices.push_back(call.on_device->device);
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::move(devices));
  Promise promise{rank, future, std::move(value), {}};
  if (call.on_device) {
    // Those of inputs too: the future of a send has no value, and callbacks behind it.
    for (const at::Tensor& tensor : call.tensors) {
      promise.storages.emplace_back(tensor.storage().getWeakStorageImpl());
    }
    for (const at::Tensor& tensor : promise.value) {
      promise.storages.emplace_back(tensor.storage().getWeakStorageImpl());
    }
  }
  const bool over = is_over();
  if (!over) {
    promises_.push_back(std::move(promise));
    eager_ = true;
  }
  lock.unlock();
  if (over) {
    fulfil(std::move(promise));
  } else {
    settle(rank);
  }
  return future;
}

}  // namespace fsdp
