#pragma once

#include <string>

#include "fsdp/process_group.h"

namespace fsdp {

/// Throws StateError unless this rank's `description` (lines) is that of the rank of `group` which
/// came first. `function` begins the message.
///
/// Ranks:   through the group's store, without waiting for others: whoever comes later compares. A
///          group without a store, as of a user's own making, is not checked.
/// Errors:  StateError with the first line that differs.
void check_same_on_ranks(const std::string& description, c10d::ProcessGroup& group,
                         const char* function = "forward");

}  // namespace fsdp
