#pragma once

namespace fsdp::sim {

/// From now on, operators on the host that read or write pinned memory are accesses, too. What
/// reads through a raw pointer is not seen.
///
/// Errors:  a race throws when its thread next has to do with a device: what ATen calls before an
///          operator may not throw.
void follow_host_accesses();

}  // namespace fsdp::sim
