#pragma once

#include <functional>

#include <c10/core/Device.h>

#include "fsdp/process_group.h"

namespace fsdp::testing {

/// How the reference suite was started.
struct SuiteOptions {
  bool processes = false;  ///< --processes: this is one rank of a job that torchrun started
};

SuiteOptions& suite_options();

/// Runs `body` on each of `world_size` ranks: threads, or the processes of the job, of which there
/// may be fewer.
void run_world(int world_size, const std::function<void(const ProcessGroupPtr&)>& body);

}  // namespace fsdp::testing
