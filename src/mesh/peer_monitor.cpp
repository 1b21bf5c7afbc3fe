#include "mesh/peer_monitor.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <c10/util/StringUtil.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fsdp {
namespace {

constexpr std::chrono::milliseconds kInquiryStep{250};
constexpr std::chrono::milliseconds kTellingTime{1500};  // others read once a beat
constexpr std::chrono::milliseconds kLeavingTime{1000};
constexpr std::chrono::milliseconds kLeavingStep{10};
const char* const kReportKey = "report";

std::string alive_key(int rank) { return c10::str("alive/", rank); }
std::string left_key(int rank) { return c10::str("left/", rank); }

std::string name_ranks(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return c10::str("rank ", ranks[0], " ");
  return c10::str("ranks [", c10::Join(", ", ranks), "] ");
}

}  // namespace

PeerMonitor::PeerMonitor(Options options) : options_(std::move(options)) {
  options_.store->add(alive_key(options_.rank), 1);
  thread_ = std::thread([this] { run(); });
}

PeerMonitor::~PeerMonitor() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void PeerMonitor::run() {
  auto next_beat = std::chrono::steady_clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    while (!stopping_) {
      lock.unlock();
      if (std::chrono::steady_clock::now() >= next_beat) {
        beat();
        next_beat = std::chrono::steady_clock::now() + kBeat;
      }
      inquire();
      lock.lock();
      const bool busy = inquiry_.running;
      const auto wake = [&] { return stopping_ || !to_tell_.empty() || inquiry_.running != busy; };
      changed_.wait_for(lock, busy ? kInquiryStep : kBeat, wake);
    }
    lock.unlock();
    leave();
  } catch (const std::exception&) {  // the connection broke, which is what diagnose() asks for
    if (!lock.owns_lock()) lock.lock();
    store_lost_ = true;
    changed_.notify_all();
  }
}

void PeerMonitor::leave() {
  c10d::Store& store = *options_.store;
  store.set(left_key(options_.rank), "1");
  int64_t num_left = store.add("num_left", 1);
  if (options_.rank != options_.store_host) return;
  const auto deadline = std::chrono::steady_clock::now() + kLeavingTime;
  while (num_left < options_.world_size && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kLeavingStep);
    num_left = store.add("num_left", 0);
  }
}

void PeerMonitor::beat() {
  c10d::Store& store = *options_.store;
  store.add(alive_key(options_.rank), 1);
  std::string report;
  if (store.check({kReportKey})) report = store.get_to_str(kReportKey);
  const std::lock_guard<std::mutex> lock(mutex_);
  report_ = std::move(report);
}

void PeerMonitor::inquire() {
  std::unique_lock<std::mutex> lock(mutex_);
  Inquiry inquiry = inquiry_;
  const std::string to_tell = std::exchange(to_tell_, "");
  lock.unlock();
  if (!to_tell.empty()) options_.store->set(kReportKey, to_tell);
  if (!inquiry.running) return;

  const auto now = std::chrono::steady_clock::now();
  std::vector<int> open;
  for (const int rank : inquiry.open) {
    const int64_t count = options_.store->add(alive_key(rank), 0);
    const auto [first, is_new] = inquiry.first_count.emplace(rank, count);
    if (options_.store->check({left_key(rank)})) {
      inquiry.left.push_back(rank);
    } else if (first->second == count) {
      (now - inquiry.begin > kDeadAfter ? inquiry.dead : open).push_back(rank);
    }
  }
  inquiry.open = std::move(open);
  inquiry.running = !inquiry.open.empty();

  lock.lock();
  inquiry_ = std::move(inquiry);
  if (!inquiry_.running) changed_.notify_all();
}

std::string PeerMonitor::verdict_of(const Inquiry& inquiry) const {
  std::string verdict;
  if (!inquiry.dead.empty()) {
    verdict += name_ranks(inquiry.dead) +
               c10::str("gave no sign of life for ", kDeadAfter.count(), " ms: dead or stopped. ");
  }
  if (!inquiry.left.empty()) verdict += name_ranks(inquiry.left) + "left the job. ";
  return verdict;
}

std::string PeerMonitor::diagnose(const std::vector<int>& ranks) {
  const std::lock_guard<std::mutex> one_at_a_time(diagnose_mutex_);
  std::unique_lock<std::mutex> lock(mutex_);
  if (!report_.empty()) return report_;
  inquiry_ = Inquiry();
  inquiry_.open = ranks;
  std::erase(inquiry_.open, options_.rank);
  inquiry_.begin = std::chrono::steady_clock::now();
  inquiry_.running = !inquiry_.open.empty() && !store_lost_;
  changed_.notify_all();
  const bool answered =
      changed_.wait_for(lock, kVerdictTime, [this] { return !inquiry_.running || store_lost_; });
  const Inquiry found = std::exchange(inquiry_, Inquiry());
  if (!report_.empty()) return report_;
  if (!answered || store_lost_) {
    const std::string host =
        options_.store_host >= 0 ? c10::str("rank ", options_.store_host, " is gone: ") : "";
    return c10::str(host, "the store at ", options_.store_address, " does not answer.");
  }
  const std::string verdict = verdict_of(found);
  if (verdict.empty()) {
    return "All ranks of the group are alive: one of them did not make this call in time, or a "
           "link broke.";
  }
  if (!found.dead.empty()) {
    to_tell_ = c10::str(verdict, "(as rank ", options_.rank, " found)");
    changed_.notify_all();
    // The store dies with this process: give the others the time to read.
    if (options_.rank == options_.store_host) {
      changed_.wait_for(lock, kTellingTime, [this] { return stopping_; });
    }
  }
  return verdict;
}

}  // namespace fsdp
