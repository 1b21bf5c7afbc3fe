#include "fsdp/process_group.h"

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "fsdp/error.h"
#include "mesh/hccl_backend.h"
#include "support/messages.h"
#include "support/processes.h"

namespace fsdp {
namespace {

using testing::contains;
using testing::free_port;
using testing::Process;
using testing::Variables;

struct Job {
  std::string scene = {};  // what the ranks do; see gloo_worker.cpp
  int world_size = 1;
  std::vector<int> ranks = {};  // those that are started
  int death_rank = -1;          // the one that the scene is about
  int hanging_rank = -1;        // killed once the others have ended
  Variables variables = {};     // over the usual ones
};

// Starts a job and returns what each rank printed, but for the hanging one.
std::map<int, std::string> run(const Job& job) {
  const int port = free_port();
  std::vector<Process> workers;
  for (const int rank : job.ranks) {
    Variables variables = job.variables;
    variables.merge(testing::rank_variables(rank, job.world_size, port));
    variables["DEATH_RANK"] = std::to_string(job.death_rank);
    workers.emplace_back(std::vector<std::string>{FSDP_GLOO_WORKER, job.scene}, variables);
  }
  std::map<int, std::string> results;
  for (size_t i = 0; i < job.ranks.size(); ++i) {
    if (job.ranks[i] != job.hanging_rank) results[job.ranks[i]] = workers[i].result();
  }
  return results;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Promise: processes find each other by torchrun's variables; collectives, sub-groups and meshes
// work over Gloo.
TEST(ProcessGroup, ProcessesDoCollectives) {
  for (const int world_size : {1, 3}) {
    std::vector<int> ranks;
    for (int rank = 0; rank < world_size; ++rank) ranks.push_back(rank);
    const Job job{.scene = "collectives", .world_size = world_size, .ranks = ranks};
    for (const auto& [rank, result] : run(job)) {
      EXPECT_EQ(result, "ok\n") << "rank " << rank << " of " << world_size;
    }
  }
}

// Promise: when a process is killed, every survivor gets a CommError that names it, in bounded
// time: far below the timeout of a minute.
TEST(ProcessGroup, AKilledRankIsNamed) {
  const auto begin = std::chrono::steady_clock::now();
  auto results = run({.scene = "death", .world_size = 3, .ranks = {0, 1, 2}, .death_rank = 2});
  EXPECT_EQ(results[2], "killed");
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(contains(results[rank], "CommError: second step: ")) << results[rank];
    EXPECT_TRUE(contains(results[rank], "rank 2 gave no sign of life")) << results[rank];
  }
  EXPECT_LT(seconds_since(begin), 30);
}

// Promise: a survivor that writes to the killed rank's socket is not killed by that.
TEST(ProcessGroup, ABrokenPipeKillsNobody) {
  for (const char* const scene : {"pipe_closed", "own_pipe_handler"}) {
    auto results = run({.scene = scene, .world_size = 1, .ranks = {0}});
    EXPECT_EQ(results[0], "ok\n") << scene;
  }
}

// Promise: the same when the rank that keeps the store is killed.
TEST(ProcessGroup, AKilledRank0IsNamed) {
  const auto begin = std::chrono::steady_clock::now();
  auto results = run({.scene = "death", .world_size = 2, .ranks = {0, 1}, .death_rank = 0});
  EXPECT_EQ(results[0], "killed");
  EXPECT_TRUE(contains(results[1], "CommError: second step: ")) << results[1];
  EXPECT_TRUE(contains(results[1], "rank 0 is gone: the store at 127.0.0.1:")) << results[1];
  EXPECT_LT(seconds_since(begin), 30);
}

// Promise: under torchrun its agent keeps the store; then rank 0 is a rank like the others.
TEST(ProcessGroup, TheStoreOfTorchrunsAgentIsUsed) {
  c10d::TCPStoreOptions options;
  options.port = 0;  // any free one
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore agent("127.0.0.1", options);
  const Variables variables = {{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                               {"TORCHELASTIC_RESTART_COUNT", "1"},
                               {"MASTER_PORT", std::to_string(agent.getPort())}};
  auto results = run({.scene = "death",
                      .world_size = 2,
                      .ranks = {0, 1},
                      .death_rank = 0,
                      .variables = variables});
  EXPECT_EQ(results[0], "killed");
  EXPECT_TRUE(contains(results[1], "rank 0 gave no sign of life")) << results[1];
}

// Promise: a rank that lives but does not come ends the others' wait after the timeout.
TEST(ProcessGroup, ARankThatHangsEndsInATimeout) {
  auto results =
      run({.scene = "hang", .world_size = 2, .ranks = {0, 1}, .death_rank = 1, .hanging_rank = 1});
  EXPECT_TRUE(contains(results[0], "CommError: second step: ")) << results[0];
  EXPECT_TRUE(contains(results[0], "All ranks of the group are alive")) << results[0];
}

// Promise: a rank that left in good order is named as that.
TEST(ProcessGroup, ARankThatLeftIsNamed) {
  auto results = run({.scene = "leave", .world_size = 2, .ranks = {0, 1}, .death_rank = 1});
  EXPECT_EQ(results[1], "ok\n");
  EXPECT_TRUE(contains(results[0], "rank 1 left the job")) << results[0];
}

// Promise: a rank that is never started is named after the timeout; also if it is rank 0.
TEST(ProcessGroup, ARankThatNeverJoinsIsNamed) {
  auto results = run({.scene = "incomplete", .world_size = 3, .ranks = {0, 1}});
  EXPECT_TRUE(contains(results[0], "CommError: init_process_group: ranks [")) << results[0];
  EXPECT_TRUE(contains(results[0], "2] of 3 did not join at 127.0.0.1:")) << results[0];
  EXPECT_TRUE(contains(results[1], "CommError: init_process_group: ")) << results[1];
  results = run({.scene = "incomplete", .world_size = 2, .ranks = {1}});
  EXPECT_TRUE(contains(results[1],
                       "CommError: init_process_group: rank 1 of 2 did not reach rank "
                       "0 within 1500 ms at 127.0.0.1:"))
      << results[1];
}

// Promise: arguments that make no sense are refused with their values.
TEST(ProcessGroup, RefusesBadArguments) {
  const auto config_error = [](auto body) -> std::string {
    try {
      body();
    } catch (const ConfigError& error) {
      return message_of(error);
    }
    return "(no ConfigError)";
  };
  ProcessGroupOptions options;
  options.backend = "nccl";
  EXPECT_EQ(config_error([&] { init_process_group(options); }),
            "init_process_group: the backend 'nccl' is not known; there is 'gloo'.");
  for (const char* backend : {"hccl", "npu:hccl", "cpu:gloo,npu:hccl"}) {
    if (make_hccl_backend != nullptr) continue;  // built with NPUs
    options.backend = backend;
    EXPECT_EQ(config_error([&] { init_process_group(options); }),
              c10::str("init_process_group: the backend '", backend,
                       "' is for Ascend NPUs, and this library was built without them. Build it "
                       "with -DFSDP_WITH_NPU=ON (docs/ascend.md)."));
  }
  options.backend = "gloo";
  options.timeout = std::chrono::milliseconds(0);
  EXPECT_EQ(config_error([&] { init_process_group(options); }),
            "init_process_group: the timeout must be positive, found 0 ms.");
  EXPECT_EQ(config_error([] { run_ranks(0, [](const ProcessGroupPtr&) {}); }),
            "run_ranks: the world size must be at least 1, found 0.");
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    EXPECT_EQ(config_error([&] { new_group(group, {}); }), "new_group: no ranks given.");
    EXPECT_EQ(config_error([&] { new_group(group, {1, 1}); }), "new_group: rank 1 is given twice.");
    EXPECT_EQ(config_error([&] {
                new_group(group, {0, 2});
              }),
              "new_group: rank 2 is not a rank of the parent, which has 2.");
    const auto foreign = c10::make_intrusive<c10d::ProcessGroup>(0, 1);
    EXPECT_TRUE(
        contains(config_error([&] { new_group(foreign, {0}); }), "the parent was not made by"));
  });
}

// Promise: inside of run_ranks a thread has its own default group and one intra-op thread; the
// caller's settings are as before.
TEST(ProcessGroup, RankThreadsHaveTheirOwnDefaults) {
  const int num_threads = at::get_num_threads();
  run_ranks(3, [](const ProcessGroupPtr& group) {
    EXPECT_EQ(default_process_group(), group);
    EXPECT_EQ(group->getBackendName(), "thread");
    EXPECT_EQ(at::get_num_threads(), 1);
    destroy_process_group();
    EXPECT_THROW(default_process_group(), StateError);
  });
  EXPECT_EQ(at::get_num_threads(), num_threads);
  EXPECT_THROW(default_process_group(), StateError);
}

}  // namespace
}  // namespace fsdp
