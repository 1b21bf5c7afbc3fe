// The stream code of the schedule: training on simulated npus gives the CPU's bits, in every order
// of execution, and the race detector sees nothing. The mutations of tests/mutations that take a
// wait away turn both red: Detector.* by its report, Late.* by the numbers alone.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>

#include "base/stream.h"
#include "fsdp/adamw.h"
#include "fsdp/fully_shard.h"
#include "fsdp/nn.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "fsdp/sim.h"
#include "sim/npu_ranks.h"
#include "support/training.h"

namespace fsdp {
namespace {

using testing::Devices;
using testing::Transformer;

constexpr int kSteps = 4;

struct Config {
  std::string name;
  Layout layout = Layout::kFlat;
  int world_size = 4;
  bool half_precision = false;
  bool replicates = false;      // 2 x (world_size / 2)
  ReshardAfterForward reshard;  // of the blocks
  bool own_devices = false;     // else all ranks on npu:0
  int num_micro_batches = 1;
  bool list = false;  // each w2 is sharded in a list with a module that never runs
  std::function<void(Transformer&)> prepare = nullptr;
  // Before each forward and behind each optimizer step, of the root.
  std::function<void(Transformer&, int micro_batch)> before_forward = nullptr;
  std::function<void(Transformer&, const c10::Device&)> after_step = nullptr;
};

std::vector<Config> in_both_layouts(std::vector<Config> configs) {
  std::vector<Config> all;
  for (const Layout layout : {Layout::kFlat, Layout::kPerParameter}) {
    for (Config config : configs) {
      config.layout = layout;
      config.name += testing::name_of(layout);
      all.push_back(std::move(config));
    }
  }
  return all;
}

// Squares what was reduced. (AdamW would hardly see a factor.)
void set_hooks(Transformer& model, std::optional<c10::Stream> stream) {
  const auto square = [](const at::Tensor& reduced) { reduced.mul_(reduced); };
  for (auto& block : model->blocks) block->set_all_reduce_hook(square, stream);
  model->set_all_reduce_hook(square, stream);
}

// As loading and converting do: the sharded parameters have other memory then.
void replace_data(Transformer& model) {
  const c10::NoGradGuard no_grad;
  for (at::Tensor& param : parameters(*model)) param.set_data(param.detach() * 0.75);
}

void record_optimizer_event(Transformer& model, const c10::Device& device) {
  c10::Event event(device.type());
  if (has_streams(device.type())) event.record(current_stream(device).raw());
  model->set_post_optim_event(std::move(event));
}

std::vector<Config> configs() {
  return in_both_layouts({
      {.name = "Plain", .reshard = true},
      {.name = "OwnDevices", .reshard = true, .own_devices = true},
      {.name = "KeepsUnsharded", .reshard = false},
      {.name = "HalfPrecision", .half_precision = true, .reshard = true, .own_devices = true},
      {.name = "ReshardsToTwo", .reshard = 2},
      {.name = "Replicates", .half_precision = true, .replicates = true, .reshard = true},
      {.name = "ReplicatesOwnDevices", .replicates = true, .reshard = false, .own_devices = true},
      {.name = "ReplicatesWithHook",
       .half_precision = true,
       .replicates = true,
       .reshard = true,
       .own_devices = true,
       .prepare = [](Transformer& model) { set_hooks(model, std::nullopt); }},
      {.name = "ReplacedData",
       .reshard = true,
       .own_devices = true,
       .before_forward = [](Transformer& model, int) { replace_data(model); }},
      // Behind the event that the gathers wait for.
      {.name = "ReplacedDataAfterOptimEvent",
       .reshard = true,
       .before_forward = [](Transformer& model, int) { replace_data(model); },
       .after_step = record_optimizer_event},
      // test_custom_hook_custom_stream of PyTorch 2.13
      {.name = "HookOnItsStream",
       .reshard = true,
       .prepare =
           [](Transformer& model) {
             const c10::Device device = parameters(*model)[0].device();
             set_hooks(model, new_stream(device, /*high_priority=*/false).raw());
           }},
  });
}

// The tests test_stream_safety_* of PyTorch 2.13, by their names there: 2 ranks on one
// device, and 4 on one each.
std::vector<Config> stream_safety_configs() {
  std::vector<Config> all;
  const auto add = [&](Config config) {
    const std::string name = config.name;
    config.world_size = 2;
    config.name = name + "TwoOnOneDevice";
    all.push_back(config);
    config.world_size = 4;
    config.own_devices = true;
    config.name = name + "FourDevices";
    all.push_back(config);
  };
  add({.name = "fsdp_basic", .reshard = true});
  add({.name = "hsdp", .replicates = true, .reshard = true});
  // Each micro-batch reduces, on top of what the one before left in flight.
  const auto last_of_two = [](Transformer& model, int micro_batch) {
    model->set_is_last_backward(micro_batch == 1);
  };
  add({.name = "grad_accumulation",
       .reshard = true,
       .num_micro_batches = 2,
       .before_forward = last_of_two});
  add({.name = "grad_accumulation_without_sync",
       .reshard = true,
       .num_micro_batches = 2,
       .before_forward = [](Transformer& model, int micro_batch) {
         model->set_requires_gradient_sync(micro_batch == 1);
       }});
  add({.name = "rs_max_input_buffers", .reshard = true, .prepare = [](Transformer& model) {
         model->set_reduce_scatter_max_input_buffers(2);
       }});
  add({.name = "mixed_precision", .half_precision = true, .reshard = true});
  add({.name = "reshard_after_forward", .reshard = 2});
  add({.name = "separate_rs_group", .reshard = true, .prepare = [](Transformer& model) {
         model->set_separate_reduce_scatter_group();
       }});
  add({.name = "hsdp_grad_accumulation",
       .replicates = true,
       .reshard = true,
       .num_micro_batches = 2,
       .before_forward = [](Transformer& model, int micro_batch) {
         model->set_is_last_backward(micro_batch == 1);
         model->set_requires_all_reduce(micro_batch == 1);
       }});
  add({.name = "post_optim_event", .reshard = true, .after_step = record_optimizer_event});
  add({.name = "partial_group_backward",
       .reshard = true,
       .num_micro_batches = 2,
       .list = true,
       .before_forward = last_of_two});
  return in_both_layouts(all);
}

// Each on two ranks in one layout and on four in the other: late execution trains four times.
std::vector<Config> half_of_stream_safety_configs() {
  std::vector<Config> half;
  for (const Config& config : stream_safety_configs()) {
    if ((config.world_size == 2) == (config.layout == Layout::kFlat)) half.push_back(config);
  }
  return half;
}

void shard(Transformer& model, const Config& config, const FullyShardOptions& options) {
  if (!config.list) return testing::shard_blocks_and_root(model, options);
  for (auto& block : model->blocks) {
    auto unused = block->register_module("unused", nn::Linear(4, 4));
    testing::init_parameters(*unused);
    fully_shard({*block->w2, *unused}, options);
  }
  fully_shard(*model, options);
}

// What rank 0 saw: the losses, and in the end the whole parameters.
std::vector<at::Tensor> train(const Config& config, bool on_npu) {
  std::vector<at::Tensor> found;
  std::optional<Devices> devices;
  if (on_npu) devices = config.own_devices ? Devices::kOneEach : Devices::kShared;
  testing::run_ranks_on(devices, config.world_size, [&](const auto& group, const auto& device) {
    Transformer model = testing::make_model({.num_layers = 3});
    FullyShardOptions options{.reshard_after_forward = config.reshard, .layout = config.layout};
    options.mesh =
        config.replicates
            ? init_device_mesh(device.type(), {2, config.world_size / 2}, {"replicate", "shard"})
            : init_device_mesh(device.type(), {config.world_size}, {"shard"});
    if (config.half_precision) {
      options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    }
    shard(model, config, options);
    if (config.prepare) config.prepare(model);
    AdamW optimizer(parameters(*model), AdamWOptions(1e-2));
    std::vector<at::Tensor> values, inputs;
    for (int i = 0; i < kSteps * config.num_micro_batches; ++i) {
      const at::Tensor tokens = (at::arange(2 * 8) * 3 + group->getRank() + i).remainder(8);
      inputs.push_back(tokens.view({2, 8}).to(device));
    }
    // Nothing here waits for the device: that would stand in for waits of streams.
    for (size_t i = 0; i < inputs.size();) {
      optimizer.zero_grad();
      for (int micro_batch = 0; micro_batch < config.num_micro_batches; ++micro_batch) {
        if (config.before_forward) config.before_forward(model, micro_batch);
        const at::Tensor loss = testing::loss_of(model, inputs[i++]);
        loss.backward();
        values.push_back(loss.detach());
      }
      optimizer.step();
      if (config.after_step) config.after_step(model, device);
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
        << "value " << i << ": " << found[i].view({-1})[0].item() << ", expected "
        << expected[i].view({-1})[0].item();
  }
}

class Streams : public ::testing::TestWithParam<Config>, testing::CleanSim {};
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
    testing::in_execution(execution,
                          [&] { expect_equal(train(GetParam(), /*on_npu=*/true), expected); });
    if (HasFatalFailure()) return;
  }
}

std::string name_of(const ::testing::TestParamInfo<Config>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Streams, Detector, ::testing::ValuesIn(configs()), name_of);
INSTANTIATE_TEST_SUITE_P(Streams, Late, ::testing::ValuesIn(configs()), name_of);
INSTANTIATE_TEST_SUITE_P(StreamSafety, Detector, ::testing::ValuesIn(stream_safety_configs()),
                         name_of);
INSTANTIATE_TEST_SUITE_P(StreamSafety, Late, ::testing::ValuesIn(half_of_stream_safety_configs()),
                         name_of);

}  // namespace
}  // namespace fsdp
