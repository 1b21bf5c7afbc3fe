#include "mesh/hccl_backend.h"

#include <torch_npu/csrc/distributed/ProcessGroupHCCL.hpp>

#include "fsdp/error.h"

namespace fsdp {

using Hccl = c10d_npu::ProcessGroupHCCL;

c10::intrusive_ptr<c10d::Backend> make_hccl_backend(const HcclOptions& options) {
  auto hccl_options = Hccl::Options::create();
  hccl_options->timeout = options.timeout;    // c10d's
  hccl_options->opTimeout = options.timeout;  // of each collective; HCCL's own is an hour
  hccl_options->group_id = options.name;
  for (const int rank : options.job_ranks) {
    hccl_options->global_ranks_in_group.push_back(static_cast<uint32_t>(rank));
  }
  return c10::make_intrusive<Hccl>(options.store, options.rank, options.world_size, hccl_options);
}

std::chrono::milliseconds hccl_timeout(const c10d::Backend& backend) {
  const auto* hccl = dynamic_cast<const Hccl*>(&backend);
  TORCH_INTERNAL_ASSERT(hccl != nullptr);
  return const_cast<Hccl*>(hccl)->getOptions()->opTimeout;
}

}  // namespace fsdp
