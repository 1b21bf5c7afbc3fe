#include "mesh/job_group.h"

#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "fsdp/error.h"
#include "mesh/gloo_backend.h"
#include "mesh/peer_monitor.h"

namespace fsdp {

JobGroup::JobGroup(Options options)
    : c10d::ProcessGroup(options.store, options.backend->getRank(), options.backend->getSize()),
      job_ranks_(std::move(options.job_ranks)),
      monitor_(std::move(options.monitor)) {
  const bool everywhere = options.backend_type == BackendType::CUSTOM;
  setBackend(c10::DeviceType::CPU, options.backend_type, options.backend);
  if (everywhere) {  // it says itself what it cannot do
    setBackend(c10::DeviceType::CUDA, options.backend_type, options.backend);
    setBackend(c10::DeviceType::PrivateUse1, options.backend_type, options.backend);
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
  options.backend = backend->split(options.store, ranks, backend_options);
  if (!options.backend) return nullptr;
  return c10::make_intrusive<JobGroup>(std::move(options));
}

}  // namespace fsdp
