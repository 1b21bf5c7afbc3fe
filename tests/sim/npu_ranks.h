#pragma once

#include <functional>
#include <optional>
#include <string>
#include <tuple>

#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/process_group.h"
#include "fsdp/sim.h"
#include "support/layouts.h"

// Ranks as threads on simulated NPUs, in either layout.
namespace fsdp::testing {

/// Whether all ranks compute on npu:0, or rank r on npu:r. Ranks that share one also share its
/// default stream. (Backward stays on each rank's thread.)
enum class Devices { kShared, kOneEach };

inline c10::Device npu_of(Devices devices, int rank) {
  return sim::device(devices == Devices::kShared ? 0 : rank);
}

using RankBody = std::function<void(const ProcessGroupPtr&, const c10::Device&)>;

/// Calls `body` on `world_size` threads, each with its device as the current one; without `devices`
/// on the CPU.
inline void run_ranks_on(std::optional<Devices> devices, int world_size, const RankBody& body) {
  run_ranks(world_size, [&](const ProcessGroupPtr& group) {
    if (!devices) return body(group, c10::Device(c10::kCPU));
    const c10::Device device = npu_of(*devices, group->getRank());
    const c10::DeviceGuard guard(device);
    body(group, device);
  });
}

/// On npus; then all work is done.
inline void run_npu_ranks(int world_size, Devices devices, const RankBody& body) {
  run_ranks_on(devices, world_size, body);
  for (int rank = 0; rank < world_size; ++rank) sim::synchronize(npu_of(devices, rank).index());
}

/// Runs eagerly, and leaves nothing of a test that failed: work in flight, or races.
inline void reset_sim() {
  sim::set_execution(sim::Execution::kEager);
  sim::set_on_race(sim::OnRace::kIgnore);
  sim::set_on_race(sim::OnRace::kThrow);
  (void)sim::take_races();
}

/// A base of fixtures.
class CleanSim {
 protected:
  CleanSim() {
    sim::enable();
    reset_sim();
  }
  ~CleanSim() { reset_sim(); }
};

/// Calls `body` in one order of execution.
inline void in_execution(sim::Execution execution, const std::function<void()>& body) {
  SCOPED_TRACE(static_cast<int>(execution));
  sim::set_execution(execution);
  ASSERT_NO_THROW(body());
  sim::set_execution(sim::Execution::kEager);
}

/// Calls `body` in every order of execution; no accesses race.
inline void in_every_execution(const std::function<void()>& body) {
  for (const auto execution : {sim::Execution::kEager, sim::Execution::kLateSideStreams,
                               sim::Execution::kLateDefaultStreams, sim::Execution::kLate}) {
    in_execution(execution, body);
    if (::testing::Test::HasFatalFailure()) return;
    EXPECT_TRUE(sim::take_races().empty());
  }
}

/// The base of a suite that runs in either layout, with a device for all ranks and for each.
class NpuTest : public ::testing::TestWithParam<std::tuple<Layout, Devices>>, CleanSim {
 protected:
  void TearDown() override { EXPECT_TRUE(sim::take_races().empty()); }

  [[nodiscard]] static Layout layout() { return std::get<0>(GetParam()); }
  [[nodiscard]] static Devices devices() { return std::get<1>(GetParam()); }
};

inline std::string name_of(Devices devices) {
  return devices == Devices::kShared ? "OneDevice" : "DeviceEach";
}

}  // namespace fsdp::testing

/// Runs the tests of `suite`, derived from NpuTest: Npu/suite.Name/Flat_OneDevice, ...
#define FSDP_ON_NPUS(suite)                                                      \
  INSTANTIATE_TEST_SUITE_P(                                                      \
      Npu, suite,                                                                \
      ::testing::Combine(::fsdp::testing::layouts(),                             \
                         ::testing::Values(::fsdp::testing::Devices::kShared,    \
                                           ::fsdp::testing::Devices::kOneEach)), \
      [](const auto& info) {                                                     \
        return ::fsdp::testing::name_of(std::get<0>(info.param)) + "_" +         \
               ::fsdp::testing::name_of(std::get<1>(info.param));                \
      })
