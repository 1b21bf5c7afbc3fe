#pragma once

#include <functional>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include "fsdp/device_mesh.h"
#include "fsdp/policy.h"
#include "fsdp/process_group.h"

// Where the reference suite runs. Models and inputs are made on the CPU, so that they are the same
// everywhere, and moved: sharded ones by fully_shard(), others with to(suite_device()).
namespace fsdp::testing {

/// How the reference suite was started.
struct SuiteOptions {
  bool processes = false;  ///< --processes: this is one rank of a job that torchrun started
  c10::DeviceType device_type = c10::DeviceType::CPU;  ///< --device
};

SuiteOptions& suite_options();

/// Runs `body` on each of `world_size` ranks: threads, or the processes of the job, of which there
/// may be fewer. The rank's device is the current one of its type.
void run_world(int world_size, const std::function<void(const ProcessGroupPtr&)>& body);

/// Keeps what a rank has computed for the comparison with other devices. The value is read when the
/// rank is done, so that nothing waits for it before.
void note_value(const at::Tensor& value);
/// Notes what this rank holds of the gradients of `model`, where it holds any.
void note_gradients(torch::nn::Module& model);

/// Writes what the tests have noted, a line for each value: test, world, rank, number, bits.
///
/// Errors:  ConfigError if the file cannot be written.
void write_noted_values(const std::string& path);
/// Whether the tests have noted, to the bit, what another run of them has written. Prints the
/// differences, and how many values were compared; none is a difference too.
[[nodiscard]] bool has_noted_values(const std::string& path);

/// The device of a rank: ranks take the devices of the suite's type in turns.
[[nodiscard]] c10::Device suite_device(int rank);
/// That of the calling rank, inside of run_world().
[[nodiscard]] c10::Device suite_device();

/// Normal numbers that belong to `seed`, made on the CPU, on suite_device().
[[nodiscard]] at::Tensor seeded_randn(at::IntArrayRef sizes, uint64_t seed);

/// A 1-D mesh over all ranks, of the suite's device type. Inside of run_world().
[[nodiscard]] DeviceMeshPtr make_mesh();
/// The arguments of fully_shard() that the suite varies, on make_mesh().
[[nodiscard]] FullyShardOptions shard_options(Layout layout,
                                              ReshardAfterForward reshard_after_forward = {});

}  // namespace fsdp::testing
