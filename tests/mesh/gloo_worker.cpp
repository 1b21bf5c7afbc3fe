// One rank of a process group test: started by process_group_test with torchrun's variables.
//
// Prints one line for the test: "ok", or the type and text of the error. The first argument says
// what to do.

#include <unistd.h>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/device_mesh.h"
#include "fsdp/error.h"
#include "fsdp/process_group.h"
#include "mesh/work.h"

namespace {

void expect(bool condition, const char* what) {
  FSDP_CHECK(fsdp::StateError, condition, "worker: not true: ", what);
}

void all_reduce(const fsdp::ProcessGroupPtr& group, const char* what,
                std::chrono::milliseconds timeout = c10d::kUnsetTimeout) {
  std::vector<at::Tensor> tensors = {at::full({1000}, group->getRank() + 1.0)};
  c10d::AllreduceOptions options;
  options.timeout = timeout;
  auto work = group->allreduce(tensors, options);
  fsdp::wait_for(*work, *group, what);
  const double n = group->getSize();
  expect(tensors[0].eq(n * (n + 1) / 2).all().item<bool>(), "all-reduce adds up");
}

fsdp::ProcessGroupPtr join(std::chrono::milliseconds timeout) {
  fsdp::ProcessGroupOptions options;
  options.timeout = timeout;
  return fsdp::init_process_group(options);
}

constexpr std::chrono::milliseconds kPatient = std::chrono::minutes(1);

// What FSDP, HSDP and DDP call, over processes; also in the groups of a mesh.
void collectives() {
  const fsdp::ProcessGroupPtr group = join(kPatient);
  const int rank = group->getRank(), n = group->getSize();
  expect(group == fsdp::default_process_group(), "the group is the default one");
  expect(group->getBackendName() == "gloo", "the backend is gloo");
  all_reduce(group, "all-reduce");
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    at::Tensor input = at::full({3}, rank, dtype), output = at::empty({3 * n}, dtype);
    fsdp::wait_for(*group->_allgather_base(output, input), *group, "all-gather");
    expect(at::equal(output, at::arange(n).to(dtype).repeat_interleave(3)), "all-gather");
    at::Tensor whole = at::arange(2 * n).to(dtype), shard = at::empty({2}, dtype);
    fsdp::wait_for(*group->_reduce_scatter_base(shard, whole), *group, "reduce-scatter");
    expect(at::equal(shard, whole.narrow(0, 2 * rank, 2) * n), "reduce-scatter");
  }
  std::vector<at::Tensor> tensors = {at::full({4}, rank)};
  fsdp::wait_for(*group->broadcast(tensors), *group, "broadcast");
  expect(tensors[0].eq(0).all().item<bool>(), "broadcast");
  if (n > 1) {
    const fsdp::ProcessGroupPtr pair = fsdp::new_group(group, {n - 1, 0});
    expect((pair != nullptr) == (rank == 0 || rank == n - 1), "who is in the pair");
    if (pair) all_reduce(pair, "pair");
    if (pair) expect(pair->getRank() == (rank == 0 ? 1 : 0), "ranks have the order of the list");
  }
  const fsdp::DeviceMesh mesh(c10::DeviceType::CPU, {1, n}, {"replicate", "shard"}, group);
  all_reduce(mesh.get_group(0), "replicate");
  all_reduce(mesh.get_group(1), "shard");
  fsdp::wait_for(*group->barrier(), *group, "barrier");
  fsdp::destroy_process_group();
}

// The rank given in DEATH_RANK is killed before the second collective.
void death() {
  const fsdp::ProcessGroupPtr group = join(kPatient);
  all_reduce(group, "first step");
  if (std::to_string(group->getRank()) == std::getenv("DEATH_RANK")) std::raise(SIGKILL);
  all_reduce(group, "second step");
}

// The rank given in DEATH_RANK stays alive, but does not call the second collective.
void hang() {
  const fsdp::ProcessGroupPtr group = join(kPatient);
  all_reduce(group, "first step");
  if (std::to_string(group->getRank()) == std::getenv("DEATH_RANK")) ::pause();
  all_reduce(group, "second step", std::chrono::milliseconds(1000));
}

// The rank given in DEATH_RANK leaves cleanly before the second collective.
void leave() {
  const fsdp::ProcessGroupPtr group = join(kPatient);
  all_reduce(group, "first step");
  if (std::to_string(group->getRank()) == std::getenv("DEATH_RANK")) {
    fsdp::destroy_process_group();
    return;
  }
  all_reduce(group, "second step");
}

// A broken pipe must not end a rank; a handler of the program's own stays.
void pipe_closed() {
  join(kPatient);
  std::raise(SIGPIPE);
  fsdp::destroy_process_group();
}

bool handled = false;

void own_pipe_handler() {
  std::signal(SIGPIPE, [](int) { handled = true; });
  join(kPatient);
  std::raise(SIGPIPE);
  expect(handled, "the handler is still there");
  fsdp::destroy_process_group();
}

// Some rank is not started.
void incomplete() { join(std::chrono::milliseconds(1500)); }

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> scenes = {
      {"collectives", collectives},
      {"death", death},
      {"hang", hang},
      {"leave", leave},
      {"pipe_closed", pipe_closed},
      {"own_pipe_handler", own_pipe_handler},
      {"incomplete", incomplete}};
  try {
    scenes.at(argc > 1 ? argv[1] : "")();
    std::cout << "ok" << std::endl;
    return 0;
  } catch (const fsdp::CommError& error) {
    std::cout << "CommError: " << fsdp::message_of(error) << std::endl;
  } catch (const fsdp::ConfigError& error) {
    std::cout << "ConfigError: " << fsdp::message_of(error) << std::endl;
  } catch (const std::exception& error) {
    std::cout << "other error: " << fsdp::message_of(error) << std::endl;
  }
  return 1;
}
