// What may overlap with what: of the work that a step puts on streams, which piece has to wait for
// which. Proven from happens-before, so it holds on any machine and at any speed.

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "base/stream.h"
#include "fsdp/adamw.h"
#include "fsdp/fully_shard.h"
#include "fsdp/module.h"
#include "fsdp/nn.h"
#include "fsdp/optim.h"
#include "sim/npu_ranks.h"

namespace fsdp {
namespace {

constexpr int kNumBlocks = 5;
constexpr int64_t kDim = 12;

// Linears one after the other, each a group; the root has no parameters.
struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    for (int i = 0; i < kNumBlocks; ++i) {
      blocks.push_back(register_module(std::to_string(i), nn::Linear(kDim, kDim)));
    }
  }
  at::Tensor forward(at::Tensor x_BD) {
    for (auto& block : blocks) x_BD = block(x_BD).relu();
    return x_BD;
  }
  std::vector<nn::Linear> blocks;
};
FSDP_MODULE(Chain);

struct Options {
  Layout layout = Layout::kFlat;
  int world_size = 2;
  bool replicates = false;
  int64_t max_input_buffers = 1;
  bool separate_group = false;
  bool post_optim_event = false;
};

// The work of one step on one rank's device, of the kinds that the tests ask for.
class Step {
 public:
  Step(const sim::Trace& trace, int rank)
      : trace_(trace), launches_(trace.launches()), device_("npu:" + std::to_string(rank) + " ") {}

  // What lies on the rank's device in a place of the program. With `on_compute` on its default
  // stream, else on its other streams.
  [[nodiscard]] std::vector<size_t> in(const std::string& place, bool on_compute) const {
    std::vector<size_t> found;
    for (size_t i = 0; i < launches_.size(); ++i) {
      const bool is_default = launches_[i].stream == device_ + "default stream";
      if (launches_[i].place == place && launches_[i].stream.starts_with(device_) &&
          is_default == on_compute) {
        found.push_back(i);
      }
    }
    return found;
  }
  [[nodiscard]] std::vector<size_t> forward(int i) const {
    return in("after FSDP::pre_forward (" + std::to_string(i) + ")", true);
  }
  // Between the group's parameters and its last gradient. A prefetch lies behind the gather.
  [[nodiscard]] std::vector<size_t> backward(int i) const {
    return in("after FSDP::pre_backward (" + std::to_string(i) + ")", true);
  }
  [[nodiscard]] std::vector<size_t> forward_gather(int i) const {
    std::vector<size_t> gathers = in("FSDP::all_gather (" + std::to_string(i) + ")", false);
    std::erase_if(gathers, [&](size_t launch) { return launch > loss(); });
    return gathers;
  }
  [[nodiscard]] std::vector<size_t> backward_gather(int i) const {
    std::vector<size_t> gathers = in("FSDP::all_gather (" + std::to_string(i) + ")", false);
    std::erase_if(gathers, [&](size_t launch) { return launch < loss(); });
    return gathers;
  }
  [[nodiscard]] std::vector<size_t> reductions(int i) const {
    return in("FSDP::post_backward_reduce (" + std::to_string(i) + ")", false);
  }

  // Whether each of `second` has to wait for the last of `first`, and there are some of both.
  [[nodiscard]] bool all_wait(const std::vector<size_t>& first,
                              const std::vector<size_t>& second) const {
    EXPECT_FALSE(first.empty());
    EXPECT_FALSE(second.empty());
    for (const size_t b : second) {
      if (!trace_.is_ordered(first.back(), b)) return false;
    }
    return true;
  }
  [[nodiscard]] bool any_waits(const std::vector<size_t>& first,
                               const std::vector<size_t>& second) const {
    EXPECT_FALSE(first.empty());
    EXPECT_FALSE(second.empty());
    for (const size_t a : first) {
      for (const size_t b : second) {
        if (trace_.is_ordered(a, b)) return true;
      }
    }
    return false;
  }
  [[nodiscard]] const std::vector<sim::Launch>& launches() const { return launches_; }

 private:
  // What follows the last group's forward.
  [[nodiscard]] size_t loss() const {
    return in("after FSDP::post_forward (" + std::to_string(kNumBlocks - 1) + ")", true).at(0);
  }

  const sim::Trace& trace_;
  std::vector<sim::Launch> launches_;
  std::string device_;
};

// Two steps; the second's forward and backward, with the optimizer's step before them, are traced.
void trace_step(const Options& options, const std::function<void(const Step&)>& look) {
  std::optional<sim::Trace> trace;
  testing::run_npu_ranks(
      options.world_size, testing::Devices::kOneEach,
      [&](const ProcessGroupPtr& group, const c10::Device& device) {
        Chain model;
        FullyShardOptions shard{.reshard_after_forward = true, .layout = options.layout};
        shard.mesh = options.replicates
                         ? init_device_mesh(device.type(), {2, options.world_size / 2},
                                            {"replicate", "shard"})
                         : init_device_mesh(device.type());
        for (auto& block : model->blocks) fully_shard(*block, shard);
        fully_shard(*model, shard);
        model->set_reduce_scatter_max_input_buffers(options.max_input_buffers);
        if (options.separate_group) model->set_separate_reduce_scatter_group();
        AdamW optimizer(parameters(*model), AdamWOptions(1e-2));
        const at::Tensor x_BD = at::ones({3, kDim}, device).requires_grad_();
        at::Tensor unrelated = at::ones({4}, device);
        for (int step = 0; step < 2; ++step) {
          model(x_BD).sum().backward();
          if (step == 1) break;
          group->barrier()->wait();
          sim::synchronize(device.index());
          group->barrier()->wait();
          if (group->getRank() == 0) trace.emplace();
          group->barrier()->wait();
          {
            RECORD_USER_SCOPE("optimizer");
            optimizer.step();
          }
          if (options.post_optim_event) {
            c10::Event event(device.type());
            event.record(current_stream(device).raw());
            model->set_post_optim_event(std::move(event));
          }
          {
            RECORD_USER_SCOPE("unrelated");
            unrelated.add_(1);
          }
          optimizer.zero_grad();
        }
      });
  for (int rank = 0; rank < options.world_size; ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    look(Step(*trace, rank));
  }
}

class Overlap : public testing::LayoutTest, testing::CleanSim {};
FSDP_BOTH_LAYOUTS(Overlap);

// Promise: in forward the next group's gather and this group's computation wait for nothing of each
// other, and each computation waits for its own gather.
TEST_P(Overlap, test_fully_shard_training_overlap_forward) {
  for (const bool replicates : {false, true}) {
    SCOPED_TRACE(replicates);
    const Options options{
        .layout = GetParam(), .world_size = replicates ? 4 : 2, .replicates = replicates};
    trace_step(options, [](const Step& step) {
      for (int i = 0; i < kNumBlocks; ++i) {
        EXPECT_TRUE(step.all_wait(step.forward_gather(i), step.forward(i))) << i;
        if (i + 1 == kNumBlocks) continue;
        EXPECT_FALSE(step.any_waits(step.forward(i), step.forward_gather(i + 1))) << i;
        EXPECT_FALSE(step.any_waits(step.forward_gather(i + 1), step.forward(i))) << i;
      }
    });
  }
}

// Promise: in backward the gather that is prefetched, and the reduction of the group before, wait
// for nothing of this group's computation, nor it for them.
TEST_P(Overlap, test_fully_shard_training_overlap_backward) {
  for (const bool replicates : {false, true}) {
    SCOPED_TRACE(replicates);
    const Options options{
        .layout = GetParam(), .world_size = replicates ? 4 : 2, .replicates = replicates};
    trace_step(options, [](const Step& step) {
      for (int i = kNumBlocks - 1; i >= 0; --i) {
        EXPECT_TRUE(step.all_wait(step.backward_gather(i), step.backward(i))) << i;
        EXPECT_TRUE(step.all_wait(step.backward(i), step.reductions(i))) << i;
        if (i > 0) {
          const auto prefetched = step.backward_gather(i - 1);
          EXPECT_FALSE(step.any_waits(step.backward(i), prefetched)) << i;
          EXPECT_FALSE(step.any_waits(prefetched, step.backward(i))) << i;
        }
        if (i + 1 < kNumBlocks) {
          EXPECT_FALSE(step.any_waits(step.reductions(i + 1), step.backward(i))) << i;
          EXPECT_FALSE(step.any_waits(step.backward(i), step.reductions(i + 1))) << i;
        }
      }
    });
  }
}

// Promise: the computation behind a group's reduction waits until the reduction before has read its
// input; with two inputs in flight, for the one before that. If gathers and reductions share a
// process group, they also run one after the other, and a computation waits for its gather.
TEST_P(Overlap, MoreReduceScatterInputsWaitForLess) {
  for (const bool separate_group : {false, true}) {
    for (const int64_t max_input_buffers : {1, 2}) {
      SCOPED_TRACE(c10::str(separate_group, " ", max_input_buffers));
      const bool waits = max_input_buffers == 1 || !separate_group;
      trace_step({.layout = GetParam(),
                  .max_input_buffers = max_input_buffers,
                  .separate_group = separate_group},
                 [&](const Step& step) {
                   for (int i = 0; i + 3 < kNumBlocks; ++i) {
                     EXPECT_EQ(step.any_waits(step.reductions(i + 2), step.backward(i)), waits)
                         << i;
                     EXPECT_TRUE(step.any_waits(step.reductions(i + 3), step.backward(i))) << i;
                   }
                 });
    }
  }
}

// Promise: the first gather waits for the optimizer, and for what follows it on the compute stream
// only without an event.
TEST_P(Overlap, test_fully_shard_post_optim_event_overlap) {
  for (const bool post_optim_event : {false, true}) {
    SCOPED_TRACE(post_optim_event);
    trace_step({.layout = GetParam(), .post_optim_event = post_optim_event}, [&](const Step& step) {
      const auto gathers = step.forward_gather(0);
      EXPECT_TRUE(step.all_wait(step.in("optimizer", true), gathers));
      EXPECT_EQ(step.any_waits(step.in("unrelated", true), gathers), !post_optim_event);
    });
  }
}

// Promise: nothing of a step waits on the host.
TEST_P(Overlap, AStepDoesNotWaitOnTheHost) {
  trace_step({.layout = GetParam()}, [](const Step& step) {
    size_t num_waits = 0;
    for (const sim::Launch& launch : step.launches()) {
      if (launch.operation != "host waits") continue;
      ++num_waits;
      // Those of the end, when the test is done.
      EXPECT_EQ(launch.thread.find("rank"), std::string::npos)
          << launch.stream << ", " << launch.place << ", " << launch.thread;
    }
    EXPECT_GT(num_waits, 0U);  // that they are seen
  });
}

}  // namespace
}  // namespace fsdp
