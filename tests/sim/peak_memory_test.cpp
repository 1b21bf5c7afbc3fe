// Peak memory of training, by the accounting of the simulator's caching allocator, beside what a
// ledger of sizes and of the order of events comes to. Each rank has a device of its own, so that
// what is live depends on the rank's program alone.

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/adamw.h"
#include "fsdp/fully_shard.h"
#include "fsdp/nn.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "fsdp/sim.h"
#include "sim/npu_ranks.h"
#include "support/layouts.h"
#include "support/models.h"
#include "support/training.h"

namespace fsdp {
namespace {

constexpr int64_t kDim = 202;  // not a multiple of 3 or 4
constexpr int64_t kRows = 4;
constexpr int kNumBlocks = 3;
constexpr int64_t kAllocatorRounding = 512;
// ThreadBackend's own while it reduces over devices: the sum, and another device's part or the
// mean.
constexpr int64_t kBackendParts = 2;

// Blocks, and a linear of the root's own, which stays unsharded from forward to backward.
struct StackImpl : torch::nn::Module {
  StackImpl() {
    for (int i = 0; i < kNumBlocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), testing::MLP(kDim)));
    }
    head = register_module("head", nn::Linear(kDim, 2 * kDim));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return head(x);
  }
  std::vector<testing::MLP> blocks;
  nn::Linear head{nullptr};
};
FSDP_MODULE(Stack);

struct Config {
  Layout layout;
  int world_size;
  bool reshard;
  bool mixed;  // compute in bf16, reduce in fp32
};

std::string name_of(const Config& config) {
  return c10::str(testing::name_of(config.layout), "World", config.world_size,
                  config.reshard ? "" : "KeepsUnsharded", config.mixed ? "Mixed" : "");
}

// Bytes of one group.
struct GroupBytes {
  int64_t shard = 0;           // of the parameters, in fp32
  int64_t unsharded = 0;       // in the dtype of compute
  int64_t gathered = 0;        // per parameter: the buffer of all ranks' parts
  int64_t reduced = 0;         // input of the reduce-scatter; its output is one rank's part
  std::vector<int64_t> grads;  // in the order in which backward makes them
};

int64_t rounded(int64_t bytes) {
  return (bytes + kAllocatorRounding - 1) / kAllocatorRounding * kAllocatorRounding;
}

// Shapes of a group's parameters, and the order of their gradients (bias and weight of the last
// linear first).
GroupBytes bytes_of(const std::vector<std::vector<int64_t>>& shapes, const Config& config) {
  const int64_t compute_bytes = config.mixed ? 2 : 4;
  GroupBytes bytes;
  int64_t shard_numel = 0, numel = 0;
  for (const auto& shape : shapes) {
    const int64_t param_numel = c10::multiply_integers(shape);
    const int64_t rows = (shape[0] + config.world_size - 1) / config.world_size;
    shard_numel += rows * (param_numel / shape[0]);
    numel += param_numel;
    bytes.grads.push_back(rounded(param_numel * compute_bytes));
    if (config.layout == Layout::kPerParameter) {
      bytes.unsharded +=
          rounded(rows * config.world_size * (param_numel / shape[0]) * compute_bytes);
    }
  }
  if (config.layout == Layout::kFlat) {
    shard_numel = (numel + config.world_size - 1) / config.world_size;  // at least
    bytes.unsharded = rounded(shard_numel * config.world_size * compute_bytes);
  } else {
    bytes.gathered = rounded(shard_numel * config.world_size * compute_bytes);
  }
  bytes.shard = shard_numel * 4;
  bytes.reduced = shard_numel * config.world_size * 4;
  return bytes;
}

// What is live, and the most that was.
class Ledger {
 public:
  void add(int64_t bytes) {
    live_ += bytes;
    peak_ = std::max(peak_, live_);
  }
  void free(int64_t bytes) { live_ -= bytes; }
  void with(int64_t bytes) {
    add(bytes);
    free(bytes);
  }
  int64_t take_peak() { return std::exchange(peak_, live_); }

 private:
  int64_t live_ = 0;
  int64_t peak_ = 0;
};

// The order of events of one training step, from after zero_grad() on: bytes above what is live
// there (shards, and the optimizer's state).
class Step {
 public:
  explicit Step(const Config& config) : config_(config), num_ranks_(config.world_size) {
    const int64_t d = kDim;
    block_ = bytes_of({{d}, {d, 4 * d}, {4 * d}, {4 * d, d}}, config);
    root_ = bytes_of({{2 * d}, {2 * d, d}}, config);
    const int64_t compute_bytes = config.mixed ? 2 : 4;
    row_ = rounded(kRows * d * compute_bytes);
    hidden_ = rounded(kRows * 4 * d * compute_bytes);
  }

  int64_t shards() const { return kNumBlocks * block_.shard + root_.shard; }

  int64_t forward() {
    gather(root_);
    if (config_.mixed) ledger_.add(row_);  // the input, cast
    int64_t kept = copy_out(root_);
    for (int i = 0; i < kNumBlocks; ++i) {
      gather(block_);
      ledger_.free(kept);
      kept = copy_out(block_);
      ledger_.add(hidden_);
      ledger_.add(hidden_);  // relu's, which both backwards need
      ledger_.free(hidden_);
      ledger_.add(row_);
      if (config_.reshard) kept = reshard(block_, kept);
    }
    ledger_.add(2 * row_);
    ledger_.free(kept);
    return ledger_.take_peak();
  }

  // A gradient of one row stands for those that pass from one operator to the next.
  int64_t backward() {
    int64_t reducing = 0;  // the input of the reduction before
    ledger_.add(2 * row_);
    int64_t root_grads = take_grads(root_);
    ledger_.free(2 * row_);
    if (config_.reshard) free_copy(gather(block_), block_);
    for (int i = kNumBlocks - 1; i >= 0; --i) {
      int64_t prefetched = 0;
      if (config_.reshard && i > 0) prefetched = gather(block_);
      ledger_.add(hidden_ + row_);
      const int64_t grads = take_grads(block_);
      ledger_.free(hidden_ + row_);
      ledger_.free(hidden_ + row_);  // saved
      ledger_.free(block_.unsharded);
      reduce(block_, grads, reducing);
      if (prefetched != 0) free_copy(prefetched, block_);
    }
    ledger_.free(root_.unsharded);
    reduce(root_, root_grads, reducing);
    ledger_.free(reducing);
    return ledger_.take_peak();
  }

 private:
  // Returns the bytes of the gather's own output.
  int64_t gather(const GroupBytes& group) {
    const int64_t bytes = is_flat() ? group.unsharded : group.gathered;
    ledger_.add(bytes);
    return bytes;
  }
  // Flat: the output becomes the parameters. Else what is kept until the next gather has begun.
  int64_t copy_out(const GroupBytes& group) {
    if (is_flat()) return 0;
    ledger_.add(group.unsharded);
    return group.gathered;
  }
  void free_copy(int64_t gathered, const GroupBytes& group) {
    if (is_flat()) return;
    ledger_.add(group.unsharded);
    ledger_.free(gathered);
  }
  // Returns what is kept after it.
  int64_t reshard(const GroupBytes& group, int64_t kept) {
    if (is_flat()) return group.unsharded;
    ledger_.free(group.unsharded);
    return kept;
  }
  // Flat: each goes into the reduction's input as soon as it is there.
  int64_t take_grads(const GroupBytes& group) {
    int64_t all = 0;
    if (is_flat()) {
      bool first = true;
      for (const int64_t grad : group.grads) {
        ledger_.add(grad);
        if (std::exchange(first, false)) ledger_.add(group.reduced);
        ledger_.free(grad);
      }
    } else {
      for (const int64_t grad : group.grads) all += grad;
      ledger_.add(all);
    }
    return all;
  }
  void reduce(const GroupBytes& group, int64_t grads, int64_t& reducing) {
    ledger_.free(reducing);
    if (!is_flat()) {
      ledger_.add(group.reduced);
      ledger_.free(grads);
    }
    reducing = group.reduced;
    const int64_t sharded_grads = group.reduced / num_ranks_;
    ledger_.add(sharded_grads);
    ledger_.with(kBackendParts * sharded_grads);
  }
  bool is_flat() const { return config_.layout == Layout::kFlat; }

  Config config_;
  int num_ranks_;
  GroupBytes block_, root_;
  int64_t row_ = 0, hidden_ = 0;
  Ledger ledger_;
};

struct Measured {
  int64_t model = 0;  // live after fully_shard()
  struct Peaks {
    int64_t base = 0, forward = 0, backward = 0, optimizer = 0;
  };
  std::vector<Peaks> steps;
};

// On each rank; peaks are above what was live before the model.
std::vector<Measured> measure(const Config& config, int num_steps) {
  std::vector<Measured> of_rank(static_cast<size_t>(config.world_size));
  testing::run_npu_ranks(
      config.world_size, testing::Devices::kOneEach, [&](const auto& group, const auto& device) {
        Measured& measured = of_rank[static_cast<size_t>(group->getRank())];
        const auto index = device.index();
        const int64_t before = sim::memory_stats(index).allocated;
        const auto live = [&] { return sim::memory_stats(index).allocated - before; };
        const auto take_peak = [&] {
          const int64_t peak = sim::memory_stats(index).peak_allocated - before;
          sim::reset_peak_memory_stats(index);
          return peak;
        };
        Stack model;
        testing::init_parameters(*model);
        FullyShardOptions options{.mesh = init_device_mesh(device.type(), {config.world_size}),
                                  .reshard_after_forward = config.reshard,
                                  .layout = config.layout};
        if (config.mixed) {
          options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
        }
        for (auto& block : model->blocks) fully_shard(*block, options);
        options.reshard_after_forward = false;
        fully_shard(*model, options);
        measured.model = live();
        const at::Tensor x =
            at::ones({kRows, kDim}, at::TensorOptions().device(device)).set_requires_grad(true);
        AdamW optimizer(parameters(*model), AdamWOptions(1e-3));
        for (int step = 0; step < num_steps; ++step) {
          optimizer.zero_grad();
          x.mutable_grad().reset();
          Measured::Peaks peaks{.base = live()};
          take_peak();
          at::Tensor loss = model(x).sum();
          peaks.forward = take_peak() - peaks.base;
          loss.backward();
          loss.reset();
          peaks.backward = take_peak() - peaks.base;
          optimizer.step();
          peaks.optimizer = take_peak() - peaks.base;
          measured.steps.push_back(peaks);
        }
      });
  return of_rank;
}

void expect_near(int64_t found, int64_t bound, int64_t base, const char* phase) {
  const double ratio = static_cast<double>(found + base) / static_cast<double>(bound + base);
  EXPECT_LE(std::abs(ratio - 1), 0.02) << phase << ": " << found << " bytes, the ledger says "
                                       << bound << " (both above " << base << ")";
}

class PeakMemory : public ::testing::TestWithParam<Config>, testing::CleanSim {};

// Promise: the peaks of forward and backward are what the ledger says, within 2 %, up and down; and
// from the second step to the twentieth they are the same to the byte.
TEST_P(PeakMemory, IsWhatTheLedgerSays) {
  const Config config = GetParam();
  Step step(config);
  const int64_t shards = step.shards();
  const int64_t forward = step.forward();
  const int64_t backward = step.backward();
  constexpr int kSteps = 20;
  for (const Measured& measured : measure(config, kSteps)) {
    expect_near(measured.model, shards, 0, "the model");
    ASSERT_EQ(measured.steps.size(), static_cast<size_t>(kSteps));
    const Measured::Peaks& second = measured.steps[1];
    expect_near(second.base, 3 * shards, 0, "shards and the optimizer's state");
    expect_near(second.forward, forward, second.base, "forward");
    expect_near(second.backward, backward, second.base, "backward");
    for (size_t i = 1; i < measured.steps.size(); ++i) {
      const Measured::Peaks& peaks = measured.steps[i];
      EXPECT_EQ(peaks.base, second.base) << "before step " << i;
      EXPECT_EQ(peaks.forward, second.forward) << "forward of step " << i;
      EXPECT_EQ(peaks.backward, second.backward) << "backward of step " << i;
      EXPECT_EQ(peaks.optimizer, second.optimizer) << "optimizer of step " << i;
    }
  }
}

std::vector<Config> configs() {
  std::vector<Config> all;
  for (const Layout layout : {Layout::kFlat, Layout::kPerParameter}) {
    for (const int world_size : {2, 3, 4}) {
      for (const bool reshard : {true, false}) {
        for (const bool mixed : {false, true}) all.push_back({layout, world_size, reshard, mixed});
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Npu, PeakMemory, ::testing::ValuesIn(configs()),
                         [](const auto& info) { return name_of(info.param); });

int64_t megabytes(int64_t n) { return n * 1000 * 1000; }

class TrainingMemory : public testing::LayoutTest, testing::CleanSim {};
FSDP_BOTH_LAYOUTS(TrainingMemory);

// Promise: the bounds of PyTorch 2.13's test of this name, its model and its slack.
TEST_P(TrainingMemory, test_fully_shard_training_memory) {
  constexpr int kWorldSize = 2;
  for (const bool reshard : {true, false}) {
    testing::run_npu_ranks(
        kWorldSize, testing::Devices::kOneEach, [&](const auto&, const auto& device) {
          const auto stats = [&] { return sim::memory_stats(device.index()); };
          const int64_t before = stats().allocated;
          sim::reset_peak_memory_stats(device.index());
          testing::Transformer model = testing::make_model({.num_layers = 3,
                                                            .vocab_size = 32,
                                                            .max_seq_len = 16,
                                                            .dim = 768,
                                                            .num_heads = 12,
                                                            .ffn_dim = 4 * 768,
                                                            .weight_tying = false});
          const auto bytes = [](const torch::nn::Module& module) {
            int64_t total = 0;
            for (const at::Tensor& param : module.parameters()) {
              total += static_cast<int64_t>(param.nbytes());
            }
            return total;
          };
          const int64_t unsharded = bytes(*model);
          const int64_t block = bytes(*model->blocks[0]);
          const int64_t non_block = unsharded - 3 * block;
          const int64_t sharded = unsharded / kWorldSize;
          testing::shard_blocks_and_root(model,
                                         {.mesh = init_device_mesh(device.type(), {kWorldSize}),
                                          .reshard_after_forward = reshard,
                                          .layout = GetParam()});
          const auto expect_at_most = [&](int64_t found, int64_t bound, const char* when) {
            EXPECT_LE(found - before, bound) << when << ", reshard " << reshard;
          };
          expect_at_most(stats().peak_allocated, sharded + block + megabytes(4), "sharding");
          const int64_t slack = megabytes(16);
          AdamW optimizer(parameters(*model), AdamWOptions(1e-2));
          const at::Tensor tokens =
              at::randint(0, 32, {1, 16}, at::TensorOptions().dtype(at::kLong)).to(device);
          at::Tensor loss = testing::loss_of(model, tokens);
          expect_at_most(stats().peak_allocated,
                         slack + sharded + (reshard ? 3 * block + non_block : unsharded + block),
                         "forward");
          loss.backward();
          expect_at_most(stats().peak_allocated,
                         slack + (reshard ? 4 * block + non_block + 2 * sharded
                                          : sharded + unsharded + 3 * block / 2),
                         "backward");
          optimizer.step();
          expect_at_most(stats().allocated, slack + 4 * sharded, "the optimizer's step");
          EXPECT_GE(stats().allocated - before, 4 * sharded) << "nothing was measured";
          optimizer.zero_grad();
          loss.reset();
          expect_at_most(stats().allocated, slack + 3 * sharded, "zero_grad");
        });
  }
}

}  // namespace
}  // namespace fsdp
