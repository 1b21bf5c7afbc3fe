#include <cstdio>
#include <string>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include "fsdp/process_group.h"
#include "reference/world.h"

// The reference suite: `reference_test` with ranks as threads, or, one rank of several,
// `torchrun --nproc-per-node=4 --no-python reference_test --processes`. `--device=npu` or
// `--device=cuda` runs it there instead of on the CPU.

namespace {

// Sets the suite's device type; false if it is unknown, or there is none of it.
bool choose_device(const std::string& name) {
  auto& type = fsdp::testing::suite_options().device_type;
  if (name == "cpu") {
    type = c10::DeviceType::CPU;
    return true;
  }
  if (name != "npu" && name != "cuda") {
    std::fprintf(stderr, "reference_test: --device=%s is unknown; there are cpu, npu and cuda\n",
                 name.c_str());
    return false;
  }
  type = name == "npu" ? c10::DeviceType::PrivateUse1 : c10::DeviceType::CUDA;
  if (!c10::impl::hasDeviceGuardImpl(type)) {
    std::fprintf(stderr,
                 "reference_test: --device=%s: this build of libtorch does not compute on such a "
                 "device\n",
                 name.c_str());
    return false;
  }
  if (c10::impl::getDeviceGuardImpl(type)->deviceCount() == 0) {
    std::fprintf(stderr, "reference_test: --device=%s: this machine has none\n", name.c_str());
    return false;
  }
  return true;
}

// Whether all arguments are known and can be done.
bool parse(int argc, char** argv) {
  const std::string device = "--device=";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--processes") {
      fsdp::testing::suite_options().processes = true;
    } else if (argument.compare(0, device.size(), device) == 0) {
      if (!choose_device(argument.substr(device.size()))) return false;
    } else {
      std::fprintf(stderr,
                   "reference_test: unknown argument %s; there are --processes and "
                   "--device=cpu|npu|cuda\n",
                   argv[i]);
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (!parse(argc, argv)) return 2;
  if (fsdp::testing::suite_options().processes) fsdp::init_process_group();
  const int result = RUN_ALL_TESTS();
  if (fsdp::testing::suite_options().processes) fsdp::destroy_process_group();
  return result;
}
