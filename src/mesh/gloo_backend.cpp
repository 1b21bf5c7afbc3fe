#include "mesh/gloo_backend.h"

// The wheel is built with it; see gloo_stubs/README.md for the headers.
#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "fsdp/error.h"

namespace fsdp {

using Gloo = c10d::ProcessGroupGloo;

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const GlooOptions& options) {
  c10::intrusive_ptr<Gloo::Options> gloo_options;
  if (options.loopback) {
    gloo_options = Gloo::Options::create(options.timeout);
    gloo_options->devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
  } else {
    gloo_options = Gloo::Options::create_default(options.timeout);
  }
  // Else a split asks for a process-wide counter of Gloo groups.
  for (int rank = 0; rank < options.world_size; ++rank) {
    gloo_options->global_ranks_in_group.push_back(static_cast<uint64_t>(rank));
  }
  return c10::make_intrusive<Gloo>(options.store, options.rank, options.world_size, gloo_options);
}

c10::intrusive_ptr<c10d::Backend::Options> copy_gloo_options(const c10d::Backend& parent) {
  const auto* gloo = dynamic_cast<const Gloo*>(&parent);
  TORCH_INTERNAL_ASSERT(gloo != nullptr);
  const c10::intrusive_ptr<Gloo::Options> from = const_cast<Gloo*>(gloo)->getOptions();
  auto copy = Gloo::Options::create(from->timeout);
  copy->devices = from->devices;
  copy->threads = from->threads;
  return copy;
}

}  // namespace fsdp
