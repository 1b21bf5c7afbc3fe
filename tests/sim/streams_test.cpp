// The stream code of the schedule: training on simulated npus gives the CPU's bits, in every order
// of execution, and the race detector sees nothing. The mutations of tests/mutations that take a
// wait away turn both red: Detector.* by its report, Late.* by the numbers alone.

#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>

#include "fsdp/adamw.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "fsdp/sim.h"
#include "support/layouts.h"
#include "support/training.h"

namespace fsdp {
namespace {

using testing::Transformer;

constexpr int kWorldSize = 4;
constexpr int kSteps = 3;

struct Config {
  std::string name;
  Layout layout = Layout::kFlat;
  bool half_precision = false;
  bool replicates = false;      // 2 x 2
  ReshardAfterForward reshard;  // of the blocks
  bool own_devices = false;     // else all ranks on npu:0
};

std::vector<Config> configs() {
  std::vector<Config> all;
  for (const Layout layout : {Layout::kFlat, Layout::kPerParameter}) {
    const std::string end = testing::name_of(layout);
    all.push_back({"Plain" + end, layout, false, false, true, false});
    all.push_back({"OwnDevices" + end, layout, false, false, true, true});
    all.push_back({"KeepsUnsharded" + end, layout, false, false, false, false});
    all.push_back({"HalfPrecision" + end, layout, true, false, true, true});
    all.push_back({"ReshardsToTwo" + end, layout, false, false, 2, false});
    all.push_back({"Replicates" + end, layout, true, true, true, false});
    all.push_back({"ReplicatesOwnDevices" + end, layout, false, true, false, true});
  }
  return all;
}

// What rank 0 saw: the losses, and in the end the whole parameters.
std::vector<at::Tensor> train(const Config& config, bool on_npu) {
  std::vector<at::Tensor> found;
  run_ranks(kWorldSize, [&](const ProcessGroupPtr& group) {
    const c10::Device device =
        on_npu ? sim::device(config.own_devices ? group->getRank() : 0) : c10::Device(c10::kCPU);
    const c10::OptionalDeviceGuard on_device(on_npu ? std::make_optional(device) : std::nullopt);
    Transformer model = testing::make_model({.num_layers = 3});
    FullyShardOptions options{.reshard_after_forward = config.reshard, .layout = config.layout};
    options.mesh = config.replicates
                       ? init_device_mesh(device.type(), {2, 2}, {"replicate", "shard"})
                       : init_device_mesh(device.type(), {kWorldSize}, {"shard"});
    if (config.half_precision) {
      options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    }
    testing::shard_blocks_and_root(model, options);
    AdamW optimizer(parameters(*model), AdamWOptions(1e-2));
    std::vector<at::Tensor> values, inputs;
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor tokens = (at::arange(2 * 8) * 3 + group->getRank() + step).remainder(8);
      inputs.push_back(tokens.view({2, 8}).to(device));
    }
    // Nothing here waits for the device: that would stand in for waits of streams.
    for (const at::Tensor& tokens : inputs) {
      optimizer.zero_grad();
      const at::Tensor loss = testing::loss_of(model, tokens);
      loss.backward();
      optimizer.step();
      values.push_back(loss.detach());
    }
    for (const at::Tensor& param : parameters(*model)) values.push_back(full_tensor(param));
    for (at::Tensor& value : values) value = value.cpu();
    if (group->getRank() == 0) found = std::move(values);
  });
  return found;
}

void expect_equal(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_TRUE(at::equal(found[i], expected[i]))
        << (i < kSteps ? "loss " : "parameter ") << i << ": " << found[i].view({-1})[0].item()
        << ", expected " << expected[i].view({-1})[0].item();
  }
}

class Streams : public ::testing::TestWithParam<Config> {
 protected:
  void SetUp() override {
    sim::enable();
    reset();
  }
  void TearDown() override { reset(); }

  // A test that failed leaves work in flight.
  static void reset() {
    sim::set_execution(sim::Execution::kEager);
    sim::set_on_race(sim::OnRace::kIgnore);
    sim::set_on_race(sim::OnRace::kThrow);
    (void)sim::take_races();
  }
};

class Detector : public Streams {};
class Late : public Streams {};

TEST_P(Detector, SeesNoRace) {
  const auto expected = train(GetParam(), /*on_npu=*/false);
  std::vector<at::Tensor> found;
  ASSERT_NO_THROW(found = train(GetParam(), /*on_npu=*/true));
  expect_equal(found, expected);
  EXPECT_TRUE(sim::take_races().empty());
}

TEST_P(Late, GivesTheSameNumbers) {
  const auto expected = train(GetParam(), /*on_npu=*/false);
  sim::set_on_race(sim::OnRace::kIgnore);
  for (const auto execution : {sim::Execution::kLateSideStreams,
                               sim::Execution::kLateDefaultStreams, sim::Execution::kLate}) {
    SCOPED_TRACE(static_cast<int>(execution));
    sim::set_execution(execution);
    std::vector<at::Tensor> found;
    ASSERT_NO_THROW(found = train(GetParam(), /*on_npu=*/true));
    sim::set_execution(sim::Execution::kEager);
    expect_equal(found, expected);
  }
}

std::string name_of(const ::testing::TestParamInfo<Config>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Streams, Detector, ::testing::ValuesIn(configs()), name_of);
INSTANTIATE_TEST_SUITE_P(Streams, Late, ::testing::ValuesIn(configs()), name_of);

}  // namespace
}  // namespace fsdp
