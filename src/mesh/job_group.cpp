#include "mesh/job_group.h"

#include <algorithm>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "fsdp/error.h"
#include "mesh/gloo_backend.h"
#include "mesh/hccl_backend.h"
#include "mesh/peer_monitor.h"

namespace fsdp {
namespace {

// The HCCL backend of some ranks of the group of `parent`; null if this rank is not among them.
// (c10d's own Backend::split is not implemented by HCCL.)
c10::intrusive_ptr<c10d::Backend> split_hccl(const c10d::Backend& parent,
                                             const std::vector<int>& ranks,
                                             const JobGroup::Options& group) {
  const auto rank = std::find(ranks.begin(), ranks.end(), parent.getRank());
  if (rank == ranks.end()) return nullptr;
  HcclOptions options;
  options.store = c10::make_intrusive<c10d::PrefixStore>("hccl", group.store);
  options.rank = static_cast<int>(rank - ranks.begin());
  options.world_size = static_cast<int>(ranks.size());
  options.job_ranks = group.job_ranks;
  options.timeout = hccl_timeout(parent);
  options.name = group.name;
  return make_hccl_backend(options);
}

}  // namespace

JobGroup::JobGroup(Options options)
    : c10d::ProcessGroup(options.store, options.backend->getRank(), options.backend->getSize()),
      job_ranks_(std::move(options.job_ranks)),
      monitor_(std::move(options.monitor)),
      npu_backend_(options.npu_backend) {
  const bool everywhere = options.backend_type == BackendType::CUSTOM;
  setBackend(c10::DeviceType::CPU, options.backend_type, options.backend);
  if (everywhere) {  // it says itself what it cannot do
    setBackend(c10::DeviceType::CUDA, options.backend_type, options.backend);
    setBackend(c10::DeviceType::PrivateUse1, options.backend_type, options.backend);
  } else if (npu_backend_) {
    setBackend(c10::DeviceType::PrivateUse1, BackendType::CUSTOM, npu_backend_);
  }
  setDefaultBackend(options.backend_type);
  setGroupName(options.name);
}

JobGroup::~JobGroup() = default;

const std::string JobGroup::getBackendName() const { return getDefaultBackend()->getBackendName(); }

ProcessGroupPtr JobGroup::split(const std::vector<int>& ranks) {
  const c10::intrusive_ptr<c10d::Backend> backend = getDefaultBackend();
  Options options;
  options.name = c10::str(getGroupName(), "/", incrementSplitCount());
  options.backend_type = getBackendType();
  options.monitor = monitor_;
  for (const int rank : ranks) options.job_ranks.push_back(job_ranks_[static_cast<size_t>(rank)]);
  options.store = c10::make_intrusive<c10d::PrefixStore>(options.name, getStore());
  c10::intrusive_ptr<c10d::Backend::Options> backend_options;
  if (options.backend_type == BackendType::GLOO) backend_options = copy_gloo_options(*backend);
  if (npu_backend_) options.npu_backend = split_hccl(*npu_backend_, ranks, options);
  options.backend = backend == npu_backend_ ? options.npu_backend
                                            : backend->split(options.store, ranks, backend_options);
  if (!options.backend) return nullptr;
  return c10::make_intrusive<JobGroup>(std::move(options));
}

}  // namespace fsdp
