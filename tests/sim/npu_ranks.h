#pragma once

#include <functional>
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

/// Calls `body` on `world_size` threads, each with its device as the current one; then all work is
/// done.
inline void run_npu_ranks(
    int world_size, Devices devices,
    const std::function<void(const ProcessGroupPtr&, const c10::Device&)>& body) {
  run_ranks(world_size, [&](const ProcessGroupPtr& group) {
    const c10::Device device = npu_of(devices, group->getRank());
    const c10::DeviceGuard guard(device);
    body(group, device);
  });
  for (int rank = 0; rank < world_size; ++rank) sim::synchronize(npu_of(devices, rank).index());
}

/// The base of a suite that runs in either layout, with a device for all ranks and for each.
class NpuTest : public ::testing::TestWithParam<std::tuple<Layout, Devices>> {
 protected:
  void SetUp() override {
    sim::enable();
    sim::set_on_race(sim::OnRace::kThrow);
    (void)sim::take_races();
  }
  void TearDown() override {
    sim::set_execution(sim::Execution::kEager);
    sim::set_on_race(sim::OnRace::kThrow);
    EXPECT_TRUE(sim::take_races().empty());
  }

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
