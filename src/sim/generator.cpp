#include "sim/generator.h"

#include <array>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>

#include "sim/machine.h"

namespace fsdp::sim {

NpuGenerator::NpuGenerator(c10::DeviceIndex device, uint64_t seed)
    : NpuGenerator(device, at::detail::createCPUGenerator(seed)) {}

NpuGenerator::NpuGenerator(c10::DeviceIndex device, at::Generator host)
    : c10::GeneratorImpl(c10::Device(kNpu, device),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      host_(std::move(host)) {}

at::Generator& NpuGenerator::default_of(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>;
    for (int i = 0; i < Machine::get().num_devices(); ++i) {
      all->push_back(at::make_generator<NpuGenerator>(static_cast<c10::DeviceIndex>(i)));
    }
    return all;
  }();
  if (device < 0) device = Machine::get().host().device;
  return generators->at(static_cast<size_t>(device));
}

const at::Generator& NpuGenerator::host_generator(const at::Generator& generator) {
  return static_cast<const NpuGenerator*>(generator.unsafeGetGeneratorImpl())->host_;
}

void NpuGenerator::set_state(const c10::TensorImpl& state) {
  host_.unsafeGetGeneratorImpl()->set_state(state);
}

c10::intrusive_ptr<c10::TensorImpl> NpuGenerator::get_state() const {
  return host_.unsafeGetGeneratorImpl()->get_state();
}

NpuGenerator* NpuGenerator::clone_impl() const {
  return new NpuGenerator(device().index(), host_.clone());
}

}  // namespace fsdp::sim
