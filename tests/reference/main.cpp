#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include "fsdp/process_group.h"
#include "reference/world.h"
#ifdef FSDP_SIM
#include "fsdp/sim.h"
#endif

// The reference suite: `reference_test` with ranks as threads, or, one rank of several,
// `torchrun --nproc-per-node=4 --no-python reference_test --processes`. `--device=npu` or
// `--device=cuda` runs it there instead of on the CPU. Where npus are simulated, `--num-devices=4`
// is how many the ranks share (1 unless given), and `--execution=late` how late their work runs
// (eager, late-side-streams, late-default-streams, late).
//
// `--write-values=FILE` keeps the bits of losses and gradients, `--compare-values=FILE` fails where
// they are other ones than those that were kept, of a run on another device.

namespace {

struct ValueFiles {
  std::string to_write;
  std::string to_compare;
};

ValueFiles& value_files() {
  static ValueFiles files;
  return files;
}

// Whether `argument` is "name=text"; then `text` is set.
bool parse_text(const std::string& argument, const std::string& name, std::string& text) {
  if (argument.rfind(name + "=", 0) != 0) return false;
  text = argument.substr(name.size() + 1);
  return true;
}

#ifdef FSDP_SIM
struct SimOptions {
  int num_devices = 1;
  fsdp::sim::Execution execution = fsdp::sim::Execution::kEager;
};

SimOptions& sim_options() {
  static SimOptions options;
  return options;
}

bool choose_execution(const std::string& name) {
  static const std::map<std::string, fsdp::sim::Execution> executions = {
      {"eager", fsdp::sim::Execution::kEager},
      {"late-side-streams", fsdp::sim::Execution::kLateSideStreams},
      {"late-default-streams", fsdp::sim::Execution::kLateDefaultStreams},
      {"late", fsdp::sim::Execution::kLate}};
  const auto found = executions.find(name);
  if (found == executions.end()) {
    std::fprintf(stderr, "reference_test: --execution=%s is unknown\n", name.c_str());
    return false;
  }
  sim_options().execution = found->second;
  return true;
}

bool parse_sim(const std::string& argument) {
  std::string text;
  if (parse_text(argument, "--num-devices", text)) {
    sim_options().num_devices = std::atoi(text.c_str());
    return true;
  }
  return parse_text(argument, "--execution", text) && choose_execution(text);
}

void start_sim() {
  if (fsdp::testing::suite_options().device_type != c10::DeviceType::PrivateUse1) return;
  fsdp::sim::enable(sim_options().num_devices);
  fsdp::sim::set_execution(sim_options().execution);
}
#else
bool parse_sim(const std::string&) { return false; }
void start_sim() {}
#endif

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
  start_sim();
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
  std::string device_name = "cpu";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--processes") {
      fsdp::testing::suite_options().processes = true;
    } else if (!parse_text(argument, "--device", device_name) &&
               !parse_text(argument, "--write-values", value_files().to_write) &&
               !parse_text(argument, "--compare-values", value_files().to_compare) &&
               !parse_sim(argument)) {
      std::fprintf(stderr,
                   "reference_test: unknown argument %s; there are --processes, "
                   "--device=cpu|npu|cuda, --write-values=FILE, --compare-values=FILE, and for "
                   "simulated npus --num-devices=N and "
                   "--execution=eager|late-side-streams|late-default-streams|late\n",
                   argv[i]);
      return false;
    }
  }
  return choose_device(device_name);
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (!parse(argc, argv)) return 2;
  if (fsdp::testing::suite_options().processes) fsdp::init_process_group();
  int result = RUN_ALL_TESTS();
  const ValueFiles& files = value_files();
  if (!files.to_write.empty()) fsdp::testing::write_noted_values(files.to_write);
  if (!files.to_compare.empty() && !fsdp::testing::has_noted_values(files.to_compare)) result = 1;
  if (fsdp::testing::suite_options().processes) fsdp::destroy_process_group();
  return result;
}
