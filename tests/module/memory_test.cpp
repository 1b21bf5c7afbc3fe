#include <algorithm>

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/fully_shard.h"
#include "fsdp/nn.h"
#include "support/counting_allocator.h"
#include "support/layouts.h"
#include "support/models.h"

// What is alive, measured by the allocator.

namespace fsdp {
namespace {

constexpr int64_t kDim = 192;
constexpr int kNumBlocks = 6;
// One block's parameters: two weights of 4 dim^2, two biases.
constexpr int64_t kBlockBytes = 4 * (8 * kDim * kDim + 5 * kDim);

struct StackImpl : torch::nn::Module {
  StackImpl() {
    for (int i = 0; i < kNumBlocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), testing::MLP(kDim)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return x;
  }
  std::vector<testing::MLP> blocks;
};
FSDP_MODULE(Stack);

class Memory : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(Memory);

Stack sharded_stack(const ReshardAfterForward& reshard, Layout layout) {
  Stack model;
  testing::init_parameters(*model);
  for (auto& block : model->blocks) {
    fully_shard(*block, {.reshard_after_forward = reshard, .layout = layout});
  }
  fully_shard(*model, {.layout = layout});
  return model;
}

// In units of one block's parameters per rank.
double in_blocks(int64_t bytes, int world_size) {
  return static_cast<double>(bytes) / static_cast<double>(kBlockBytes * world_size);
}

void barrier(const ProcessGroupPtr& group) { group->barrier()->wait(); }

// What a rank holds above its shards, in blocks: the most in forward, then in backward.
double forward_bound(Layout layout, int world_size, bool reshard) {
  const double unsharded = reshard ? 1 : kNumBlocks;
  // Flat, parameters are read where they were gathered; else the last block's gather buffer is
  // still there. (With one rank nothing is gathered.)
  return unsharded + (layout == Layout::kFlat || world_size == 1 ? 0 : 1);
}

double backward_bound(Layout layout, int world_size, bool reshard) {
  double bound = 0;
  for (int done = 0; done < kNumBlocks; ++done) {  // blocks that were reduced, or are being
    const int to_do = kNumBlocks - done;
    const double unsharded = reshard ? std::min(to_do, 2) : to_do;  // 2: one is prefetched
    const double in_flight = done > 0 && world_size > 1 ? 1 : 0;    // input of the reduction before
    // Flat, each gradient goes into the next reduction's input as soon as autograd has made it; the
    // largest is half of the block. Else there are all of them, and they are copied when the
    // reduction before is over and this block's parameters are freed.
    const double grads = layout == Layout::kFlat ? 1.5 : 1;
    const double sharded_grads = static_cast<double>(done) / world_size;
    bound = std::max(bound, unsharded + in_flight + grads + sharded_grads);
  }
  return bound;
}

constexpr double kActivations = 0.05;  // of one row, and padding

void expect_bounds(Layout layout, int world_size, bool reshard) {
  testing::CountingAllocator allocator;
  run_ranks(world_size, [&](const ProcessGroupPtr& group) {
    Stack model = sharded_stack(reshard, layout);
    const at::Tensor x = at::ones({1, kDim}).set_requires_grad(true);
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      model->release_buffers();
      barrier(group);
      const int64_t shards = allocator.live_bytes();
      barrier(group);
      if (group->getRank() == 0) allocator.take_peak_bytes();
      barrier(group);
      const at::Tensor loss = model(x).sum();
      model->release_buffers();
      barrier(group);
      if (group->getRank() == 0) {
        const double peak = in_blocks(allocator.take_peak_bytes() - shards, world_size);
        const double kept = in_blocks(allocator.live_bytes() - shards, world_size);
        EXPECT_LE(peak, forward_bound(layout, world_size, reshard) + kActivations) << "in forward";
        EXPECT_GE(peak, reshard ? 1 : kNumBlocks) << "nothing was measured";
        EXPECT_LE(kept, (reshard ? 0 : kNumBlocks) + kActivations) << "after forward";
      }
      barrier(group);
      loss.backward();
      model->release_buffers();
      barrier(group);
      if (group->getRank() == 0) {
        const double peak = in_blocks(allocator.take_peak_bytes() - shards, world_size);
        const double bound = backward_bound(layout, world_size, reshard);
        EXPECT_LE(peak, bound + kActivations) << "in backward";
        // One rank waits for nobody, so it comes to its bound; of several not all at one time.
        if (world_size == 1 && step == 0) EXPECT_GE(peak, bound) << "the bound is not tight";
        const double grads = static_cast<double>(kNumBlocks) / world_size;
        EXPECT_LE(in_blocks(allocator.live_bytes() - shards, world_size), grads + kActivations);
      }
      barrier(group);
    }
  });
}

// Promise: above the shards, forward holds one block (and per parameter its gather buffer);
// backward at most two unsharded blocks (one prefetched), one block's gradients, one of them twice
// if flat, and the input of one reduction. With reshard_after_forward = false forward holds all.
TEST_P(Memory, AtMostTwoBlocksAreUnsharded) {
  for (const int world_size : {1, 2, 3}) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE(c10::str("world ", world_size, ", reshard ", reshard));
      expect_bounds(GetParam(), world_size, reshard);
    }
  }
}

// Promise: between steps a root keeps one or two buffers of gathers and reductions, whatever the
// number of its groups and steps; release_buffers() frees them; so does its end.
TEST_P(Memory, BuffersAreKeptAndReleased) {
  constexpr int64_t kRows = 1024;  // of 1024
  constexpr int64_t kLinearBytes = 4 * kRows * kRows;
  constexpr int kWorldSize = 2;
  testing::CountingAllocator allocator;
  run_ranks(kWorldSize, [&](const ProcessGroupPtr& group) {
    const auto live = [&] {  // of all ranks, in buffers
      barrier(group);
      const double bytes = static_cast<double>(allocator.live_bytes());
      barrier(group);
      return bytes / kLinearBytes;
    };
    const double before = live();
    for (const int num_layers : {2, 5}) {
      fsdp::nn::Sequential model;
      std::vector<fsdp::nn::Linear> layers;
      for (int i = 0; i < num_layers; ++i) {
        layers.emplace_back(torch::nn::LinearOptions(kRows, kRows).bias(false));
        model->push_back(layers.back());
        fully_shard(*layers.back(), {.reshard_after_forward = true, .layout = GetParam()});
      }
      fully_shard(*model, {.layout = GetParam()});
      const double shards = live();
      const auto step = [&] {
        model->forward(at::ones({1, kRows})).sum().backward();
        for (at::Tensor& param : model->parameters()) param.mutable_grad().reset();
      };
      for (int i = 0; i < 3; ++i) {
        step();
        // One of reductions if the first was over before the second began, else both.
        const double kept = live() - shards;
        EXPECT_GE(kept, kWorldSize - kActivations) << num_layers << " layers";
        EXPECT_LE(kept, 2 * kWorldSize + kActivations) << num_layers << " layers";
      }
      model->release_buffers();
      EXPECT_NEAR(live(), shards, kActivations);
      step();
    }
    EXPECT_NEAR(live(), before, kActivations);
  });
}

// Promise: zero_grad() frees the sharded gradients, nothing else holds them.
TEST_P(Memory, ZeroGradFreesTheGradients) {
  testing::CountingAllocator allocator;
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    Stack model = sharded_stack(true, GetParam());
    barrier(group);
    const int64_t shards = allocator.live_bytes();
    barrier(group);
    for (int step = 0; step < 2; ++step) {
      model(at::ones({1, kDim})).sum().backward();
      model->zero_grad();
      model->release_buffers();
      barrier(group);
      EXPECT_LE(in_blocks(allocator.live_bytes() - shards, 2), kActivations) << "step " << step;
      barrier(group);
    }
  });
}

// Promise: twenty training steps hold what two hold, and a model that is deleted leaves nothing:
// no cycle keeps it.
TEST_P(Memory, NothingIsLeftOver) {
  testing::CountingAllocator allocator;
  const int64_t before = allocator.live_bytes();
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    Stack model = sharded_stack(true, GetParam());
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
    int64_t after_two_steps = 0;
    for (int step = 0; step < 20; ++step) {
      model(at::ones({1, kDim})).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
      model->release_buffers();
      barrier(group);
      if (step == 1) after_two_steps = allocator.live_bytes();
      // The barriers' own one-byte tensors may still be alive.
      if (step > 1) EXPECT_NEAR(allocator.live_bytes(), after_two_steps, 8) << "step " << step;
      barrier(group);
    }
    // A step that threw leaves nothing either.
    EXPECT_ANY_THROW(model(at::ones({1, kDim + 1})));
    model(at::ones({1, kDim})).sum().backward();
    model->zero_grad();
    model->release_buffers();
    barrier(group);
    EXPECT_NEAR(allocator.live_bytes(), after_two_steps, 8);
    barrier(group);
  });
  EXPECT_EQ(allocator.live_bytes(), before);
}

}  // namespace
}  // namespace fsdp
