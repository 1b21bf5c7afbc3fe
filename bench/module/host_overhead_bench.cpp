// Question: how much host time does sharding cost per group and step, with communication taken out?
//
// A chain of small linears, each its own group, over a backend whose collectives do nothing.
// Process CPU time (all threads) of forward and backward, that of the same chain unsharded, in
// turns, subtracted; the median of the repetitions. One JSON line per configuration. Beside it:
// bench/peer/host_overhead.py, the same in PyTorch's FSDP2, and the floor: the two collective calls
// alone, through the dispatcher.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/fsdp.h"
#include "support/local_backend.h"

namespace {

using fsdp::bench::Collectives;
using fsdp::bench::cpu_us;

// `params_per_group` of them: linears in a row, two parameters each.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int params_per_group) {
    for (int i = 0; i < params_per_group / 2; ++i) {
      linears.push_back(register_module(std::to_string(i), torch::nn::Linear(8, 8)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& linear : linears) x = linear(x);
    return x;
  }
  std::vector<torch::nn::Linear> linears;
};
FSDP_MODULE(Block);

struct ChainImpl : torch::nn::Module {
  ChainImpl(int num_groups, int params_per_group) {
    for (int i = 0; i < num_groups; ++i) {
      blocks.push_back(register_module(std::to_string(i), Block(params_per_group)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return x;
  }
  std::vector<Block> blocks;
};
FSDP_MODULE(Chain);

struct Times {
  double forward = 0;
  double backward = 0;
};

Times step(Chain& model, const at::Tensor& x) {
  const double begin = cpu_us();
  const at::Tensor loss = model(x).sum();
  const double middle = cpu_us();
  loss.backward();
  const double end = cpu_us();
  for (at::Tensor& param : model->parameters()) param.mutable_grad().reset();
  return {.forward = middle - begin, .backward = end - middle};
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// What an all-gather and a reduce-scatter cost that do nothing: twice a gather, once a reduction.
double floor_us(const fsdp::ProcessGroupPtr& group) {
  at::Tensor small = at::zeros({8}), large = at::zeros({8 * group->getSize()});
  constexpr int kCalls = 2000;
  double best = 1e30;
  for (int repetition = 0; repetition < 5; ++repetition) {
    const double begin = cpu_us();
    for (int i = 0; i < kCalls; ++i) {
      group->_allgather_base(large, small);
      group->_allgather_base(large, small);
      group->_reduce_scatter_base(small, large);
    }
    best = std::min(best, (cpu_us() - begin) / kCalls);
  }
  return best;
}

void run(int num_groups, int world_size, int params_per_group, int repetitions) {
  Chain eager(num_groups, params_per_group);
  Chain sharded(num_groups, params_per_group);
  const fsdp::ProcessGroupPtr group = fsdp::bench::local_group(world_size, Collectives::kNothing);
  const fsdp::DeviceMeshPtr mesh = fsdp::bench::mesh_of(group);
  for (auto& block : sharded->blocks) {
    fsdp::fully_shard(*block, {.mesh = mesh, .reshard_after_forward = true});
  }
  fsdp::fully_shard(*sharded, {.mesh = mesh});
  const at::Tensor x = at::ones({1, 8}).set_requires_grad(true);
  std::vector<double> forward, backward, alone;
  for (int i = 0; i < repetitions + 2; ++i) {
    // In turns: the machine may be slower for a while.
    const Times without = step(eager, x);
    const Times with = step(sharded, x);
    if (i < 2) continue;  // first allocations, lazy init
    forward.push_back((with.forward - without.forward) / num_groups);
    backward.push_back((with.backward - without.backward) / num_groups);
    alone.push_back((without.forward + without.backward) / num_groups);
  }
  std::printf(
      "{\"case\": \"host-overhead\", \"who\": \"libfsdp\", \"groups\": %d, \"world_size\": %d, "
      "\"params_per_group\": %d, \"unit\": \"us of CPU per group\", \"forward\": %.1f, "
      "\"backward\": %.1f, \"total\": %.1f, \"eager\": %.1f, \"floor\": %.1f}\n",
      num_groups, world_size, params_per_group, median(forward), median(backward),
      median(forward) + median(backward), median(alone), floor_us(group));
  std::fflush(stdout);
}

}  // namespace

// host_overhead_bench [REPETITIONS [GROUPS WORLD_SIZE PARAMS_PER_GROUP]]
int main(int argc, char** argv) {
  at::set_num_threads(1);
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 20;
  if (argc > 4) {
    run(std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), repetitions);
    return 0;
  }
  for (const int num_groups : {50, 100, 400}) run(num_groups, 2, 2, repetitions);
  for (const int world_size : {128, 1024}) run(100, world_size, 2, repetitions);
  run(50, 2, 64, repetitions);
  return 0;
}
