#pragma once

#include <functional>
#include <optional>
#include <string>

#include "fsdp/process_group.h"

namespace fsdp {

/// Who this process is in its job, and where rank 0 keeps the store.
struct Rendezvous {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  ///< among the ranks on this machine; the device to use
  std::string master_addr;
  int master_port = 0;
  /// torchrun's agent keeps the store at the master address, and this process is only a client.
  bool store_of_agent = false;
  std::string restart_count = "0";  ///< of torchrun: each attempt has keys of its own
  std::string launcher;             ///< "torchrun", "Open MPI", "MPICH", "Slurm" or "options"
};

/// Looks one variable up; empty if it is not set.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;

/// Reads what the options leave open from the environment that a launcher gives each process.
///
/// Rank and world size come from one launcher: the options, else the first of torchrun, Open MPI,
/// MPICH, Slurm that set one of its variables. Under the last three the master defaults to this
/// machine if all ranks are on it, and the port to one that follows from the job's id.
/// Errors:  ConfigError names the missing variables or the bad value, and what to set.
[[nodiscard]] Rendezvous read_rendezvous(const ProcessGroupOptions& options,
                                         const Environment& environment);

/// The environment of this process.
[[nodiscard]] Environment process_environment();

}  // namespace fsdp
