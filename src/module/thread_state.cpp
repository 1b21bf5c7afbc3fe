#include "module/thread_state.h"

#include <algorithm>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>

namespace fsdp {
namespace {

// The CPU, and each device of the inputs that can compute.
std::vector<c10::Device> devices_of(const TensorRefs& inputs) {
  std::vector<c10::Device> devices{c10::Device(c10::kCPU)};
  for (const at::Tensor* input : inputs) {
    const c10::Device device = input->device();
    const bool known = std::find(devices.begin(), devices.end(), device) != devices.end();
    if (!known && at::isAccelerator(device.type())) devices.push_back(device);
  }
  return devices;
}

}  // namespace

GeneratorStates::GeneratorStates(std::vector<at::Generator> generators)
    : generators_(std::move(generators)) {
  for (at::Generator& generator : generators_) {
    const std::lock_guard<std::mutex> lock(generator.mutex());  // torch's, of each generator
    states_.push_back(generator.get_state());
  }
}

void GeneratorStates::restore() const {
  for (size_t i = 0; i < generators_.size(); ++i) {
    at::Generator generator = generators_[i];
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(states_[i]);
  }
}

std::vector<at::Generator> default_generators(const TensorRefs& inputs) {
  std::vector<at::Generator> generators;
  for (const c10::Device device : devices_of(inputs)) {
    generators.push_back(at::globalContext().defaultGenerator(device));
  }
  return generators;
}

AutocastState::AutocastState(const TensorRefs& inputs) {
  for (const c10::Device device : devices_of(inputs)) {
    if (!at::autocast::is_autocast_available(device.type())) continue;
    devices_.push_back({.device_type = device.type(), .enabled = false, .dtype = at::kFloat});
  }
  read();
}

void AutocastState::read() {
  for (OfDevice& device : devices_) {
    device.enabled = at::autocast::is_autocast_enabled(device.device_type);
    device.dtype = at::autocast::get_autocast_dtype(device.device_type);
  }
  cache_enabled_ = at::autocast::is_autocast_cache_enabled();
}

void AutocastState::write() const {
  for (const OfDevice& device : devices_) {
    at::autocast::set_autocast_enabled(device.device_type, device.enabled);
    at::autocast::set_autocast_dtype(device.device_type, device.dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_enabled_);
}

AutocastState AutocastState::now() const {
  AutocastState now = *this;
  now.read();
  return now;
}

AutocastState::Guard::Guard(const AutocastState& state) : before_(state.now()) {
  state.write();
  at::autocast::increment_nesting();
}

AutocastState::Guard::~Guard() {
  // Casts of weights that were cached here would be found by the next step.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  before_.write();
}

}  // namespace fsdp
