#pragma once

#include <ATen/core/Generator.h>

namespace fsdp::sim {

/// The random number generator of an npu: one of the CPU under another device's name, so that the
/// CPU's kernels can draw from it.
class NpuGenerator final : public c10::GeneratorImpl {
 public:
  explicit NpuGenerator(c10::DeviceIndex device, uint64_t seed = c10::default_rng_seed_val);

  static at::Generator& default_of(c10::DeviceIndex device);
  /// The CPU generator behind `generator`, which is of an npu.
  static const at::Generator& host_generator(const at::Generator& generator);

  void set_current_seed(uint64_t seed) override { host_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host_.set_offset(offset); }
  uint64_t get_offset() const override { return host_.get_offset(); }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return host_.seed(); }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

 private:
  NpuGenerator(c10::DeviceIndex device, at::Generator host);
  NpuGenerator* clone_impl() const override;

  at::Generator host_;
};

}  // namespace fsdp::sim
