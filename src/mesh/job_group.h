#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/process_group.h"

namespace fsdp {

class PeerMonitor;

/// A process group that knows which ranks of the job it holds, and how to ask whether they live.
class JobGroup final : public c10d::ProcessGroup {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Backend> backend;
    c10d::ProcessGroup::BackendType backend_type = c10d::ProcessGroup::BackendType::CUSTOM;
    c10::intrusive_ptr<c10d::Backend> npu_backend;  ///< HCCL, for tensors on NPUs; else null
    std::vector<int> job_ranks;                     ///< by rank of this group
    c10::intrusive_ptr<c10d::Store> store;
    std::shared_ptr<PeerMonitor> monitor;  ///< null for rank threads
    std::string name;
  };

  explicit JobGroup(Options options);
  ~JobGroup() override;

  const std::string getBackendName() const override;
  [[nodiscard]] const std::vector<int>& job_ranks() const { return job_ranks_; }
  [[nodiscard]] bool has_npu() const { return npu_backend_.defined(); }
  [[nodiscard]] PeerMonitor* monitor() const { return monitor_.get(); }

  /// The group of `ranks` (of this one); null if this rank is not among them.
  [[nodiscard]] ProcessGroupPtr split(const std::vector<int>& ranks);

 private:
  const std::vector<int> job_ranks_;
  std::shared_ptr<PeerMonitor> monitor_;
  const c10::intrusive_ptr<c10d::Backend> npu_backend_;  // may be the default one, or null
};

/// Makes `group` the default one of the calling thread; null forgets it.
void set_default_process_group(ProcessGroupPtr group);

}  // namespace fsdp
