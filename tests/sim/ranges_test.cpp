// Reports and traces of the simulated accelerator name the module and the part of the step.

#include "base/range.h"

#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include "base/stream.h"
#include "fsdp/fully_shard.h"
#include "fsdp/module.h"
#include "fsdp/nn.h"
#include "sim/npu_ranks.h"

namespace fsdp {
namespace {

using testing::Devices;

// Its user reads the weight on a stream of his own, with or without waiting for the gather.
struct PeekImpl : torch::nn::Module {
  PeekImpl() { weight = register_parameter("weight", at::ones({12, 4})); }
  at::Tensor forward(const at::Tensor& x_BD) {
    if (!side) return at::linear(x_BD, weight);
    const Stream compute = current_stream(weight.device());
    if (waits) side->wait(compute);
    {
      const StreamGuard on_side(*side);
      peeked = weight.detach().sum();
    }
    if (waits) compute.wait(*side);
    return at::linear(x_BD, weight);
  }

  at::Tensor weight, peeked;
  std::optional<Stream> side;
  bool waits = true;
};
FSDP_MODULE(Peek);

struct TwoPeeksImpl : torch::nn::Module {
  TwoPeeksImpl() {
    first = register_module("first", Peek());
    second = register_module("second", Peek());
  }
  at::Tensor forward(const at::Tensor& x_BD) { return second(first(x_BD).narrow(1, 0, 4)); }

  Peek first{nullptr}, second{nullptr};
};
FSDP_MODULE(TwoPeeks);

TwoPeeks sharded_model(Layout layout, const c10::Device& device) {
  TwoPeeks model;
  const FullyShardOptions options{
      .mesh = init_device_mesh(device.type()), .reshard_after_forward = true, .layout = layout};
  fully_shard(*model->first, options);
  fully_shard(*model->second, options);
  fully_shard(*model, options);
  return model;
}

class SimRanges : public testing::NpuTest {};
FSDP_ON_NPUS(SimRanges);

// Promise: a user's stream that reads a parameter without waiting is reported with what wrote the
// parameter and with the module whose forward reads it.
TEST_P(SimRanges, AReportNamesBothSides) {
  for (const bool waits : {true, false}) {
    const auto step = [&] {
      testing::run_npu_ranks(2, devices(), [&](const ProcessGroupPtr&, const c10::Device& device) {
        TwoPeeks model = sharded_model(layout(), device);
        model->second->side = new_stream(device, false);
        model->second->waits = waits;
        model(at::ones({1, 4}, device)).sum().backward();
      });
    };
    if (waits) {
      EXPECT_NO_THROW(step());
      continue;
    }
    EXPECT_THROW(step(), sim::RaceError);
    const std::vector<sim::Race> races = sim::take_races();
    ASSERT_FALSE(races.empty());
    const sim::Race& race = races[0];
    EXPECT_TRUE(race.first.is_write);
    EXPECT_EQ(race.first.place, layout() == Layout::kFlat ? "FSDP::all_gather (second)"
                                                          : "FSDP::all_gather_copy_out (second)");
    EXPECT_EQ(race.second.operation, "aten::sum");
    EXPECT_EQ(race.second.place, "after FSDP::pre_forward (second)");
    EXPECT_NE(race.describe().find(", after FSDP::pre_forward (second), by thread rank "),
              std::string::npos)
        << race.describe();
  }
}

// The ranges that this thread opens while it lives, in order.
class RangeLog {
 public:
  RangeLog() {
    names().clear();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& range)
                                       -> std::unique_ptr<at::ObserverContext> {
          names().emplace_back(range.name());
          return nullptr;
        }).scopes({at::RecordScope::USER_SCOPE}));
  }
  ~RangeLog() { at::removeCallback(handle_); }
  RangeLog(const RangeLog&) = delete;
  RangeLog& operator=(const RangeLog&) = delete;

  static std::vector<std::string>& names() {
    thread_local std::vector<std::string> names;
    return names;
  }

 private:
  at::CallbackHandle handle_;
};

class Ranges : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(Ranges);

// Promise: the names are PyTorch's, and come in the order of a step. (On CPU, where backward runs
// on the rank's own thread.)
TEST_P(Ranges, AreThoseOfPyTorch) {
  run_ranks(2, [&](const ProcessGroupPtr&) {
    TwoPeeks model = sharded_model(GetParam(), c10::Device(c10::kCPU));
    model->first->set_modules_to_forward_prefetch({model->second.get()});
    const at::Tensor x_BD = at::ones({1, 4}).requires_grad_();
    const RangeLog log;
    model(x_BD).sum().backward();
    const std::vector<std::string> expected{
        "FSDP::root_pre_forward",
        "FSDP::pre_forward (first)",
        "FSDP::all_gather (first)",
        "FSDP::all_gather_copy_out (first)",
        "FSDP::forward_prefetch for second",
        "FSDP::all_gather (second)",
        "FSDP::post_forward (first)",
        "FSDP::pre_forward (second)",
        "FSDP::all_gather_copy_out (second)",
        "FSDP::post_forward (second)",
        "FSDP::pre_backward (second)",
        "FSDP::all_gather (second)",
        "FSDP::all_gather_copy_out (second)",
        "FSDP::backward_prefetch for first",
        "FSDP::all_gather (first)",
        "FSDP::post_backward_accumulate (second)",
        "FSDP::post_backward_reshard (second)",
        "FSDP::post_backward_rs_wait (second)",
        "FSDP::post_backward_reduce (second)",
        "FSDP::pre_backward (first)",
        "FSDP::all_gather_copy_out (first)",
        "FSDP::post_backward_accumulate (first)",
        "FSDP::post_backward_reshard (first)",
        "FSDP::post_backward_rs_wait (first)",
        "FSDP::post_backward_reduce (first)",
        "FSDP::root_post_backward_callback",
    };
    EXPECT_EQ(log.names(), expected);
  });
}

}  // namespace
}  // namespace fsdp
