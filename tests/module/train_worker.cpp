// One process of a sharded training, started by process_parity_test or by torchrun:
// train_worker Flat|PerParameter, the layout.
//
// Trains the small decoder for ten steps and prints "rank step loss" per step; the last line is
// "rank error <message>" if it failed. With DEATH_RANK that rank kills itself in the fifth step.

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include <ATen/Parallel.h>
#include <torch/optim/adamw.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "support/layouts.h"
#include "support/training.h"

namespace {

fsdp::Layout layout_named(const std::string& name) {
  for (const fsdp::Layout layout : {fsdp::Layout::kFlat, fsdp::Layout::kPerParameter}) {
    if (fsdp::testing::name_of(layout) == name) return layout;
  }
  TORCH_CHECK(false, "there is no layout ", name);
}

void train_sharded(const fsdp::ProcessGroupPtr& group, fsdp::Layout layout, int death_rank) {
  const fsdp::testing::TrainingOptions options{.optimizer = fsdp::testing::OptimizerKind::kAdamW};
  fsdp::testing::Transformer model = fsdp::testing::make_model(options.model);
  for (auto& block : model->blocks) fsdp::fully_shard(*block, {.layout = layout});
  fsdp::fully_shard(*model, {.layout = layout});
  torch::optim::AdamW optimizer(fsdp::parameters(*model), torch::optim::AdamWOptions(3e-3));
  const int64_t local_batch = options.batch_size / group->getSize();
  for (int step = 0; step < options.num_steps; ++step) {
    if (step == 4 && group->getRank() == death_rank) ::kill(::getpid(), SIGKILL);
    const at::Tensor tokens = fsdp::testing::batch_of_step(options, step)
                                  .narrow(0, local_batch * group->getRank(), local_batch);
    const at::Tensor loss = fsdp::testing::loss_of(model, tokens);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    std::printf("%d %d %.17g\n", group->getRank(), step,
                fsdp::testing::mean_over_ranks(loss.item<double>(), group));
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const char* death_rank = std::getenv("DEATH_RANK");
  const char* rank = std::getenv("RANK");
  try {
    const fsdp::ProcessGroupPtr group = fsdp::init_process_group();
    TORCH_CHECK(argc == 2, "usage: train_worker LAYOUT");
    train_sharded(group, layout_named(argv[1]), death_rank != nullptr ? std::atoi(death_rank) : -1);
    fsdp::destroy_process_group();
  } catch (const std::exception& error) {
    std::cout << rank << " error " << fsdp::message_of(error) << std::endl;
    return 1;
  }
  return 0;
}
