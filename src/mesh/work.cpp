#include "mesh/work.h"

#include <exception>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "fsdp/error.h"
#include "mesh/job_group.h"
#include "mesh/peer_monitor.h"

namespace fsdp {

void wait_for(c10d::Work& work, const c10d::ProcessGroup& group, std::string_view what) {
  std::string reason;
  try {
    if (work.wait()) return;
    reason = "the backend gave up";
  } catch (const CommError& error) {  // ours: names the ranks already
    FSDP_CHECK(CommError, false, what, ": ", message_of(error));
  } catch (const std::exception& error) {
    reason = message_of(error);
  }
  const auto* job_group = dynamic_cast<const JobGroup*>(&group);
  if (job_group != nullptr && job_group->monitor() != nullptr) {
    reason += ". " + job_group->monitor()->diagnose(job_group->job_ranks());
  }
  FSDP_CHECK(CommError, false, what, ": ", reason);
}

}  // namespace fsdp
