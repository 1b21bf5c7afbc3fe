#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include <gtest/gtest.h>

#include "fsdp/fully_shard.h"
#include "support/layouts.h"
#include "support/messages.h"
#include "support/processes.h"
#include "support/training.h"

// Ranks as processes over Gloo, against ranks as threads.

namespace fsdp {
namespace {

using testing::Process;
using testing::TrainingOptions;
using testing::Transformer;

// Losses by step as the ranks of train_worker print them; every rank's are to agree.
std::vector<double> losses_in(const std::string& output) {
  std::vector<double> losses(10, -1);
  std::istringstream lines(output);
  int rank = 0, step = 0;
  for (double loss = 0; lines >> rank >> step >> loss;) {
    if (losses[step] >= 0) EXPECT_EQ(loss, losses[step]) << "rank " << rank << " step " << step;
    losses[step] = loss;
  }
  return losses;
}

std::vector<double> losses_of_threads(int world_size, Layout layout) {
  const TrainingOptions options{.optimizer = testing::OptimizerKind::kAdamW};
  std::vector<double> losses;
  run_ranks(world_size, [&](const ProcessGroupPtr& group) {
    const testing::TrainingLog log = testing::train(options, group, [&](Transformer& model) {
      for (auto& block : model->blocks) fully_shard(*block, {.layout = layout});
      fully_shard(*model, {.layout = layout});
    });
    if (group->getRank() == 0) losses = log.losses;
  });
  return losses;
}

void expect_equal_losses(const std::vector<double>& ours, const std::vector<double>& expected) {
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_NEAR(ours[i], expected[i], 1e-5 * expected[i]) << "step " << i;
  }
}

std::vector<Process> start_job(int world_size, Layout layout, int death_rank = -1) {
  const int port = testing::free_port();
  std::vector<Process> processes;
  for (int rank = 0; rank < world_size; ++rank) {
    testing::Variables variables = testing::rank_variables(rank, world_size, port);
    variables["DEATH_RANK"] = std::to_string(death_rank);
    processes.emplace_back(std::vector<std::string>{FSDP_TRAIN_WORKER, testing::name_of(layout)},
                           variables);
  }
  return processes;
}

class ProcessParity : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(ProcessParity);

// Promise: processes over Gloo give the losses of ranks as threads; their reductions add up in
// another order, so to 1e-5.
TEST_P(ProcessParity, GlooEqualsThreads) {
  for (const int world_size : {2, 3}) {
    std::string output;
    std::vector<Process> processes = start_job(world_size, GetParam());
    for (Process& process : processes) output += process.result();
    expect_equal_losses(losses_in(output), losses_of_threads(world_size, GetParam()));
  }
}

// Promise: torchrun starts the ranks, without Python in them.
TEST_P(ProcessParity, TorchrunEqualsThreads) {
  const char* torchrun = FSDP_TORCHRUN;
  if (!std::filesystem::exists(torchrun)) GTEST_SKIP() << "torch was given without its torchrun";
  Process launcher({torchrun, "--nproc-per-node=2", "--no-python",
                    "--master-port=" + std::to_string(testing::free_port()), FSDP_TRAIN_WORKER,
                    testing::name_of(GetParam())},
                   {});
  expect_equal_losses(losses_in(launcher.result()), losses_of_threads(2, GetParam()));
}

// Promise: when a rank is killed in the middle of a training, each other rank ends with an error
// that names it, long before the collectives' timeout of five minutes.
TEST_P(ProcessParity, AKilledRankIsNamedByTheOthers) {
  for (const int death_rank : {1, 0}) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<Process> processes = start_job(3, GetParam(), death_rank);
    for (int rank = 0; rank < 3; ++rank) {
      const std::string result = processes[rank].result();
      if (rank == death_rank) {
        EXPECT_EQ(result, "killed");
      } else {
        EXPECT_NE(result.find("error"), std::string::npos) << result;
        EXPECT_NE(result.find("rank " + std::to_string(death_rank)), std::string::npos) << result;
      }
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  }
}

// Promise: the same among threads: the others' error carries the message of the rank that threw.
TEST_P(ProcessParity, AThrowingThreadIsNamedByTheOthers) {
  std::vector<std::string> messages(3);
  EXPECT_THROW(run_ranks(3,
                         [&](const ProcessGroupPtr& group) {
                           testing::MLP model(4);
                           fully_shard(*model, {.layout = GetParam()});
                           const auto step = [&] { model(at::ones({2, 4})).sum().backward(); };
                           step();
                           if (group->getRank() == 1) throw std::runtime_error("out of luck");
                           messages[group->getRank()] = testing::message_thrown<CommError>(step);
                         }),
               std::runtime_error);
  for (const int rank : {0, 2}) {
    EXPECT_NE(messages[rank].find("rank 1"), std::string::npos) << messages[rank];
    EXPECT_NE(messages[rank].find("out of luck"), std::string::npos) << messages[rank];
  }
}

}  // namespace
}  // namespace fsdp
