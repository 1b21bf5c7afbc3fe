#pragma once

#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "fsdp/fsdp_module.h"

namespace fsdp {

/// The states of some random generators.
class GeneratorStates {
 public:
  GeneratorStates() = default;
  explicit GeneratorStates(std::vector<at::Generator> generators);
  /// Sets the generators back to these states.
  void restore() const;
  /// The states of the same generators now.
  [[nodiscard]] GeneratorStates now() const { return GeneratorStates(generators_); }

 private:
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;
};

/// The default generators of the CPU and of the inputs' devices.
[[nodiscard]] std::vector<at::Generator> default_generators(const TensorRefs& inputs);

/// What autocast does on this thread, for the CPU and for the inputs' devices.
class AutocastState {
 public:
  explicit AutocastState(const TensorRefs& inputs);
  class Guard;

 private:
  struct OfDevice {
    c10::DeviceType device_type;
    bool enabled;
    at::ScalarType dtype;
  };
  [[nodiscard]] AutocastState now() const;
  void read();
  void write() const;

  std::vector<OfDevice> devices_;
  bool cache_enabled_ = true;
};

/// Sets the thread to a state; destroyed, back to what was before.
class AutocastState::Guard {
 public:
  explicit Guard(const AutocastState& state);
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  AutocastState before_;
};

}  // namespace fsdp
