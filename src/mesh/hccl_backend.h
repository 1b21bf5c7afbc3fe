#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fsdp {

struct HcclOptions {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::vector<int> job_ranks;  ///< by rank of the group; empty: all of the job
  std::chrono::milliseconds timeout{0};
  std::string name;  ///< of the group
};

/// HCCL, the collectives of Ascend NPUs, on the calling thread's current NPU. Ranks connect at
/// their first collective. Null in a build without FSDP_WITH_NPU: ask before calling.
[[gnu::weak]] c10::intrusive_ptr<c10d::Backend> make_hccl_backend(const HcclOptions& options);

/// The timeout that an HCCL backend was made with. Null as make_hccl_backend is.
[[gnu::weak]] std::chrono::milliseconds hccl_timeout(const c10d::Backend& backend);

/// Starts torch_npu in this process, if it is not yet, and makes NPU number `index` the current
/// device of the calling thread. Null as make_hccl_backend is.
///
/// Errors:  ConfigError if this machine has no NPU of that number; StateError with what torch_npu
///          says if it does not start.
[[gnu::weak]] void init_npu(int index);

/// Ends torch_npu in this process: waits for the NPUs, and gives back what it has of them. No work
/// on NPUs after it. Null as make_hccl_backend is.
[[gnu::weak]] void end_npu();

}  // namespace fsdp
