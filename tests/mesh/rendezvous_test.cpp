#include "mesh/rendezvous.h"

#include <map>

#include <gtest/gtest.h>

#include "fsdp/error.h"
#include "support/messages.h"

namespace fsdp {
namespace {

using testing::contains;
using Variables = std::map<std::string, std::string>;

Rendezvous read(const Variables& variables, const ProcessGroupOptions& options = {}) {
  return read_rendezvous(options, [&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string config_error_of(const Variables& variables, const ProcessGroupOptions& options = {}) {
  try {
    (void)read(variables, options);
  } catch (const ConfigError& error) {
    return message_of(error);
  }
  return "(no ConfigError)";
}

// Promise: torchrun's variables are read as torchrun sets them.
TEST(Rendezvous, Torchrun) {
  const Rendezvous found = read({{"RANK", "5"},
                                 {"WORLD_SIZE", "8"},
                                 {"LOCAL_RANK", "1"},
                                 {"LOCAL_WORLD_SIZE", "4"},
                                 {"MASTER_ADDR", "node0"},
                                 {"MASTER_PORT", "1234"},
                                 {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                 {"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_EQ(found.launcher, "torchrun");
  EXPECT_EQ(found.rank, 5);
  EXPECT_EQ(found.world_size, 8);
  EXPECT_EQ(found.local_rank, 1);
  EXPECT_EQ(found.master_addr, "node0");
  EXPECT_EQ(found.master_port, 1234);
  EXPECT_TRUE(found.store_of_agent);
  EXPECT_EQ(found.restart_count, "2");
}

// Promise: without the agent's store rank 0 keeps it.
TEST(Rendezvous, TorchrunWithoutAgentStore) {
  Variables variables = {
      {"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}};
  EXPECT_FALSE(read(variables).store_of_agent);
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  EXPECT_FALSE(read(variables).store_of_agent);
  EXPECT_EQ(read(variables).restart_count, "0");
}

// Promise: mpirun and srun on one machine need no master address.
TEST(Rendezvous, LaunchersOnOneMachineNeedNoMaster) {
  const Rendezvous open_mpi = read({{"OMPI_COMM_WORLD_RANK", "1"},
                                    {"OMPI_COMM_WORLD_SIZE", "2"},
                                    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_EQ(open_mpi.launcher, "Open MPI");
  EXPECT_EQ(open_mpi.rank, 1);
  EXPECT_EQ(open_mpi.world_size, 2);
  EXPECT_EQ(open_mpi.local_rank, 1);
  EXPECT_EQ(open_mpi.master_addr, "127.0.0.1");
  EXPECT_EQ(open_mpi.master_port, 29500);

  const Rendezvous mpich = read(
      {{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "2"}, {"MPI_LOCALNRANKS", "3"}});
  EXPECT_EQ(mpich.launcher, "MPICH");
  EXPECT_EQ(mpich.rank, 2);
  EXPECT_EQ(mpich.local_rank, 2);
  EXPECT_EQ(mpich.master_addr, "127.0.0.1");

  const Rendezvous slurm = read({{"SLURM_PROCID", "3"},
                                 {"SLURM_NTASKS", "4"},
                                 {"SLURM_LOCALID", "3"},
                                 {"SLURM_NNODES", "1"}});
  EXPECT_EQ(slurm.launcher, "Slurm");
  EXPECT_EQ(slurm.rank, 3);
  EXPECT_EQ(slurm.world_size, 4);
  EXPECT_EQ(slurm.local_rank, 3);
  EXPECT_EQ(slurm.master_addr, "127.0.0.1");
}

// Promise: over several machines the master address is asked for, and used.
TEST(Rendezvous, LaunchersOverMachinesNeedAMaster) {
  Variables variables = {{"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "4"}, {"SLURM_NNODES", "2"}};
  EXPECT_TRUE(contains(config_error_of(variables), "MASTER_ADDR is not set"));
  EXPECT_TRUE(contains(config_error_of(variables), "Set MASTER_ADDR to the host of rank 0"));
  variables["MASTER_ADDR"] = "node7";
  EXPECT_EQ(read(variables).master_addr, "node7");
  EXPECT_TRUE(contains(config_error_of({{"OMPI_COMM_WORLD_RANK", "1"},
                                        {"OMPI_COMM_WORLD_SIZE", "4"},
                                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
                       "MASTER_ADDR is not set"));
  EXPECT_TRUE(
      contains(config_error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), "MASTER_ADDR is not set"));
}

// Promise: two jobs on a machine get different ports, the ranks of one job the same.
TEST(Rendezvous, PortsFollowTheJob) {
  const auto port = [](const std::string& job, const std::string& rank) {
    return read({{"SLURM_PROCID", rank},
                 {"SLURM_NTASKS", "2"},
                 {"SLURM_NNODES", "1"},
                 {"SLURM_JOB_ID", job}})
        .master_port;
  };
  EXPECT_EQ(port("4711", "0"), port("4711", "1"));
  EXPECT_NE(port("4711", "0"), port("4712", "0"));
  EXPECT_GE(port("4711", "0"), 20000);
  EXPECT_LT(port("4711", "0"), 29000);
}

// Promise: inside of a Slurm allocation mpirun counts, and inside of both torchrun does.
TEST(Rendezvous, TheInnermostLauncherCounts) {
  Variables variables = {{"SLURM_PROCID", "0"},         {"SLURM_NTASKS", "1"},
                         {"SLURM_NNODES", "1"},         {"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  EXPECT_EQ(read(variables).launcher, "Open MPI");
  variables.insert({{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "h"}});
  EXPECT_EQ(read(variables).launcher, "torchrun");
  EXPECT_EQ(read(variables).rank, 2);
}

// Promise: options win over the environment, one by one.
TEST(Rendezvous, OptionsWin) {
  ProcessGroupOptions options;
  options.rank = 1;
  options.world_size = 3;
  options.master_addr = "here";
  options.master_port = 77;
  const Variables variables = {
      {"RANK", "0"},         {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "there"},
      {"MASTER_PORT", "78"}, {"LOCAL_RANK", "0"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
  const Rendezvous found = read(variables, options);
  EXPECT_EQ(found.launcher, "options");
  EXPECT_EQ(found.rank, 1);
  EXPECT_EQ(found.world_size, 3);
  EXPECT_EQ(found.master_addr, "here");
  EXPECT_EQ(found.master_port, 77);
  EXPECT_FALSE(found.store_of_agent);  // another store than the agent's was asked for
  ProcessGroupOptions only_rank;
  only_rank.rank = 1;
  EXPECT_EQ(read(variables, only_rank).rank, 1);
  EXPECT_EQ(read(variables, only_rank).world_size, 2);
  ProcessGroupOptions alone;
  alone.rank = 0;
  alone.world_size = 1;
  EXPECT_EQ(read({}, alone).master_addr, "127.0.0.1");
}

// Promise: what is missing or wrong is named.
TEST(Rendezvous, NamesWhatIsMissingOrWrong) {
  const std::string nothing = config_error_of({});
  for (const char* name : {"RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                           "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "torchrun"}) {
    EXPECT_TRUE(contains(nothing, name)) << name << " in " << nothing;
  }
  EXPECT_TRUE(contains(config_error_of({{"RANK", "0"}}),
                       "WORLD_SIZE is not set, but other variables of torchrun are"));
  EXPECT_TRUE(contains(config_error_of({{"PMI_SIZE", "2"}}), "PMI_RANK is not set"));
  EXPECT_TRUE(contains(config_error_of({{"RANK", "zero"}, {"WORLD_SIZE", "1"}}),
                       "RANK='zero' is not an integer"));
  EXPECT_TRUE(
      contains(config_error_of({{"RANK", ""}, {"WORLD_SIZE", "1"}}), "RANK='' is not an integer"));
  EXPECT_TRUE(contains(config_error_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), "rank 2 of 2 ranks"));
  EXPECT_TRUE(
      contains(config_error_of({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), "rank -1 of 2 ranks"));
  EXPECT_TRUE(contains(
      config_error_of(
          {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "70000"}}),
      "the master port 70000 is not between 1 and 65535"));
}

}  // namespace
}  // namespace fsdp
