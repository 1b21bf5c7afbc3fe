#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fsdp {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// How the ranks of a job find each other. What is left unset is read from the environment that
/// torchrun, mpirun or srun gives each process.
struct ProcessGroupOptions {
  std::optional<int> rank;
  std::optional<int> world_size;
  std::optional<std::string> master_addr;  ///< host of rank 0
  std::optional<int> master_port;          ///< TCP port on that host where rank 0 keeps the store
  /// "gloo", for tensors of the CPU. In a build with FSDP_WITH_NPU also "hccl", for those of the
  /// rank's NPU, and "cpu:gloo,npu:hccl", for both.
  std::string backend = "gloo";
  /// A collective that some rank does not join ends with CommError after this long.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// Joins this process to the job and makes its group the default one of the calling thread.
///
/// Ranks:   every rank calls it, with the same backend and world size; returns when all are there.
/// Devices: with HCCL the NPU of the rank's number on its machine (LOCAL_RANK) becomes the calling
///          thread's current device; destroy_process_group must be called before main returns.
/// Threads: also starts one thread that tells the others every second that this rank is alive, so
///          that an error can name the rank that died.
/// Signals: SIGPIPE is ignored from now on, unless the program has a handler of its own for it.
/// Errors:  ConfigError names each missing variable of the launchers' environments, or the bad
///          value, or the NPU that is not there; CommError if the others do not come within
///          `timeout`.
/// Source:  torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), Open MPI
///          (OMPI_COMM_WORLD_*), MPICH (PMI_RANK, PMI_SIZE), Slurm (SLURM_PROCID, SLURM_NTASKS).
ProcessGroupPtr init_process_group(const ProcessGroupOptions& options = {});

/// The group that init_process_group or run_ranks gave this rank's thread; StateError without one.
ProcessGroupPtr default_process_group();

/// Forgets the default group of the calling thread and leaves the job. With HCCL it also ends the
/// use of NPUs in this process: tensors on them may still be freed, and nothing else.
void destroy_process_group();

/// A new group of `ranks` (ranks of `parent`, in the order they shall have), on the same backend.
///
/// Ranks:   every rank of `parent` calls it with the same lists in the same order; a rank that is
///          not in `ranks` gets null.
/// Errors:  ConfigError for a repeated rank or one outside of `parent`.
ProcessGroupPtr new_group(const ProcessGroupPtr& parent, const std::vector<int>& ranks);

struct RunRanksOptions {
  /// A collective that some rank does not join ends with CommError after this long.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
};

/// Runs `body` once per rank, each rank a thread of this process, and waits for all of them.
///
/// The threads share one address space, so a collective is a copy from the peer's memory. The
/// group is also the thread's default group. Each rank computes on one thread.
///
/// Streams: collectives also work on tensors of a device; ranks may share one, or each set its own
/// as
///          the current one (c10::DeviceGuard) before it makes a mesh.
/// Errors:  if a rank throws, the others get CommError with its message at their next collective
///          (also while they wait in one), and the first rank's own error is rethrown here.
void run_ranks(int world_size, const std::function<void(const ProcessGroupPtr&)>& body,
               const RunRanksOptions& options = {});

}  // namespace fsdp
