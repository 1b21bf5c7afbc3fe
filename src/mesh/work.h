#pragma once

#include <string_view>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace fsdp {

/// Waits for a collective. On a device with streams the current stream waits, not the host.
///
/// Errors:  CommError that names `what`, the backend's reason and, where they can be told, the
///          ranks that are gone.
void wait_for(c10d::Work& work, const c10d::ProcessGroup& group, std::string_view what);

}  // namespace fsdp
