#include "reference/world.h"

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>
#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/stream.h"
#include "fsdp/error.h"

namespace fsdp::testing {
namespace {

// By "test, world, rank, number": the bits of the value.
std::map<std::string, std::string> noted_values;
std::mutex noted_mutex;
int num_worlds = 0;  // that the running test has had
thread_local std::vector<at::Tensor> noted_here;

std::string bits_of(const at::Tensor& value) {
  const at::Tensor host = value.detach().cpu().contiguous();
  const auto* bytes = static_cast<const uint8_t*>(host.const_data_ptr());
  uint64_t hash = 14695981039346656037U;  // FNV-1a
  for (size_t i = 0; i < host.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211U;
  char text[80];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return c10::str(text, " ", host.scalar_type(), " ", host.sizes());
}

void keep_noted_values(int rank) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  for (size_t i = 0; i < noted_here.size(); ++i) {
    const std::string bits = bits_of(noted_here[i]);
    const std::lock_guard lock(noted_mutex);
    noted_values[c10::str(test->test_suite_name(), ".", test->name(), " world ", num_worlds,
                          " rank ", rank, " value ", i)] = bits;
  }
  noted_here.clear();
}

}  // namespace

void note_value(const at::Tensor& value) { noted_here.push_back(value.detach()); }

void note_gradients(torch::nn::Module& model) {
  for (const at::Tensor& param : model.parameters()) {
    if (param.grad().defined()) note_value(param.grad());
  }
}

void write_noted_values(const std::string& path) {
  std::ofstream file(path);
  for (const auto& [name, bits] : noted_values) file << name << ": " << bits << "\n";
  file.close();
  FSDP_CHECK(ConfigError, file.good(), "reference_test: cannot write ", path);
}

bool has_noted_values(const std::string& path) {
  std::ifstream file(path);
  std::map<std::string, std::string> expected;
  for (std::string line; std::getline(file, line);) {
    const size_t end = line.find(": ");
    if (end != std::string::npos) expected[line.substr(0, end)] = line.substr(end + 2);
  }
  size_t num_different = 0;
  for (const auto& [name, bits] : noted_values) {
    if (expected[name] == bits) continue;
    ++num_different;
    std::printf("%s: expected %s, found %s\n", name.c_str(), expected[name].c_str(), bits.c_str());
  }
  std::printf("%zu values compared with %s: %zu differ\n", noted_values.size(), path.c_str(),
              num_different);
  return num_different == 0 && !noted_values.empty();
}

SuiteOptions& suite_options() {
  static SuiteOptions options;
  return options;
}

void run_world(int world_size, const std::function<void(const ProcessGroupPtr&)>& body) {
  const auto run = [&](const ProcessGroupPtr& group) {
    std::optional<c10::DeviceGuard> guard;
    if (has_streams(suite_options().device_type)) guard.emplace(suite_device());
    noted_here.clear();
    body(group);
    keep_noted_values(group->getRank());
  };
  static const ::testing::TestInfo* test = nullptr;  // that ran the last world
  const auto* running = ::testing::UnitTest::GetInstance()->current_test_info();
  num_worlds = running == test ? num_worlds + 1 : 0;
  test = running;
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
