#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace fsdp {

/// Tells which processes of a job are still there.
///
/// Each process counts up its own key of the job's store once a second, from a thread and over a
/// connection of its own. A rank whose key stands still is gone, and so is the host of a store that
/// does not answer. The store is asked about others only after a collective failed.
class PeerMonitor {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;  ///< a connection that nobody else uses
    std::string store_address;              ///< for messages
    int rank = 0;
    int world_size = 1;
    /// The rank whose process keeps the store; -1 if that is torchrun's agent.
    int store_host = 0;
  };

  /// Gives the first sign of life, so that all ranks are known once all monitors are made.
  explicit PeerMonitor(Options options);
  /// Tells the others that this rank has left. The rank that keeps the store waits a little for
  /// them, so that the end of a job is not an error to those that leave last.
  ~PeerMonitor();
  PeerMonitor(const PeerMonitor&) = delete;
  PeerMonitor& operator=(const PeerMonitor&) = delete;

  /// A sentence about which of `ranks` are gone, have left, or are all alive.
  ///
  /// Takes up to kVerdictTime, less if what is found is certain earlier. The first rank that finds
  /// a dead one tells the others, because they often notice only that this rank left.
  [[nodiscard]] std::string diagnose(const std::vector<int>& ranks);

  static constexpr std::chrono::milliseconds kBeat{1000};
  static constexpr std::chrono::milliseconds kDeadAfter{3500};    // without a beat
  static constexpr std::chrono::milliseconds kVerdictTime{8000};  // then the store is lost

 private:
  // What is asked of the thread, and what it found.
  struct Inquiry {
    std::vector<int> open;  // ranks that nothing is known about yet
    std::vector<int> dead;
    std::vector<int> left;
    std::map<int, int64_t> first_count;
    std::chrono::steady_clock::time_point begin;
    bool running = false;
  };

  void run();
  void beat();
  void inquire();
  void leave();
  [[nodiscard]] std::string verdict_of(const Inquiry& inquiry) const;

  const Options options_;

  std::mutex diagnose_mutex_;  // one diagnosis at a time
  std::mutex mutex_;           // guards all below; never held while the store is asked
  std::condition_variable changed_;
  Inquiry inquiry_;
  std::string report_;   // another rank's verdict
  std::string to_tell_;  // this rank's verdict, not yet published
  bool store_lost_ = false;
  bool stopping_ = false;
  std::thread thread_;  // alone uses the store
};

}  // namespace fsdp
