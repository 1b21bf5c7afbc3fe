#include "reference/world.h"

#include <optional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/stream.h"

namespace fsdp::testing {

SuiteOptions& suite_options() {
  static SuiteOptions options;
  return options;
}

void run_world(int world_size, const std::function<void(const ProcessGroupPtr&)>& body) {
  const auto run = [&](const ProcessGroupPtr& group) {
    std::optional<c10::DeviceGuard> guard;
    if (has_streams(suite_options().device_type)) guard.emplace(suite_device());
    body(group);
  };
  if (!suite_options().processes) {
    run_ranks(world_size, run);
    return;
  }
  const ProcessGroupPtr group = default_process_group();
  run(group);
  group->barrier()->wait();  // the next test's calls are its own
}

c10::Device suite_device(int rank) {
  const c10::DeviceType type = suite_options().device_type;
  if (!has_streams(type)) return c10::Device(type);
  const int num_devices = c10::impl::getDeviceGuardImpl(type)->deviceCount();
  return c10::Device(type, static_cast<c10::DeviceIndex>(rank % num_devices));
}

c10::Device suite_device() { return suite_device(default_process_group()->getRank()); }

at::Tensor seeded_randn(at::IntArrayRef sizes, uint64_t seed) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, generator).to(suite_device());
}

DeviceMeshPtr make_mesh() { return init_device_mesh(suite_options().device_type); }

FullyShardOptions shard_options(Layout layout, ReshardAfterForward reshard_after_forward) {
  return {.mesh = make_mesh(), .reshard_after_forward = reshard_after_forward, .layout = layout};
}

}  // namespace fsdp::testing
