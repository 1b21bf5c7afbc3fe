#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fsdp {

struct GlooOptions {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout{0};
  bool loopback = false;  ///< all ranks are on this machine: do not ask for the host's address
};

/// The Gloo backend of the torch wheel. Returns when this rank is connected.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const GlooOptions& options);

/// Options for a Backend::split of a Gloo backend: the parent's devices and timeout. The parent's
/// own must not be passed, split writes to them.
c10::intrusive_ptr<c10d::Backend::Options> copy_gloo_options(const c10d::Backend& parent);

}  // namespace fsdp
