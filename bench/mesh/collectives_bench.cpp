// Question: at what speed do ranks that are threads communicate, and how much of it do a gather of
// parameters and a reduction of gradients keep?
//
// Collectives of ThreadBackend, wall time of one, the ranks in step; beside it bench/peer/
// collectives.py, the same over Gloo. Then a group's unshard and its reduction over collectives
// that only read and write memory: the floor is a memcpy of the unsharded bytes between warm
// buffers, or what the reduction has to read and write. Medians. JSON lines.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/process_group.h"
#include "reduce/reduce_scatter.h"
#include "schedule/fsdp_param_group.h"
#include "support/local_backend.h"

namespace {

using fsdp::ProcessGroupPtr;
using fsdp::bench::Collectives;
using fsdp::bench::wall_us;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

double median_us(int repetitions, const std::function<void()>& body) {
  std::vector<double> times;
  for (int i = 0; i < repetitions + 2; ++i) {
    const double begin = wall_us();
    body();
    if (i >= 2) times.push_back(wall_us() - begin);
  }
  return median(std::move(times));
}

std::string size_name(int64_t bytes) {
  return bytes >= (1 << 20) ? std::to_string(bytes >> 20) + " MiB"
                            : std::to_string(bytes >> 10) + " KiB";
}

void print(const std::string& metric, const char* unit, double value, double floor) {
  std::printf("{\"case\": \"collectives\", \"metric\": \"%s\", \"unit\": \"%s\", \"value\": %.3f",
              metric.c_str(), unit, value);
  if (floor > 0) std::printf(", \"floor\": %.3f", floor);
  std::printf("}\n");
  std::fflush(stdout);
}

// One collective between ranks: `bytes` of the tensor that has all ranks' parts.
void collective(int world_size, bool gathers, at::ScalarType dtype, int64_t bytes) {
  const int repetitions = bytes >= (16 << 20) ? 7 : bytes >= (1 << 20) ? 30 : 300;
  const int64_t numel = bytes / static_cast<int64_t>(c10::elementSize(dtype)) / world_size;
  double found = 0;
  fsdp::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
    at::Tensor whole = at::ones({numel * world_size}, dtype), part = at::ones({numel}, dtype);
    const double time = median_us(repetitions, [&] {
      (gathers ? group->_allgather_base(whole, part) : group->_reduce_scatter_base(part, whole))
          ->wait();
    });
    group->barrier()->wait();
    if (group->getRank() == 0) found = time;
  });
  std::vector<char> from(static_cast<size_t>(bytes), 1), to(static_cast<size_t>(bytes), 1);
  const double copy =
      median_us(repetitions, [&] { std::memcpy(to.data(), from.data(), from.size()); });
  print(std::string(gathers ? "all-gather " : "reduce-scatter ") + c10::toString(dtype) + " " +
            size_name(bytes) + ", " + std::to_string(world_size) + " ranks",
        "us", found, copy);
}

std::shared_ptr<fsdp::FSDPParamGroup> make_group(const at::Tensor& param, fsdp::Layout layout) {
  const auto group = fsdp::bench::local_group(/*world_size=*/2, Collectives::kMemory);
  const auto mesh_info = std::make_shared<const fsdp::FSDPMeshInfo>(
      fsdp::FSDPMeshInfo{.mesh = fsdp::bench::mesh_of(group), .shard_mesh_dim = 0});
  const auto result = std::make_shared<fsdp::FSDPParamGroup>(
      std::vector<fsdp::ParamToShard>{{.tensor = param, .name = "weight"}}, mesh_info, layout,
      c10::Device(c10::kCPU), fsdp::GroupSettings{.post_forward_mesh_info = mesh_info});
  result->lazy_init();
  return result;
}

// Payload of a gather, in parts of a warm memcpy's.
void unshard(int64_t bytes) {
  constexpr int64_t kColumns = 1024;
  const int64_t rows = bytes / 4 / kColumns;
  const auto group =
      make_group(at::ones({rows, kColumns}).set_requires_grad(true), fsdp::Layout::kFlat);
  const double time = median_us(9, [&] {
    group->unshard();
    group->wait_for_unshard();
    group->reshard();
  });
  std::vector<char> from(static_cast<size_t>(bytes), 1), to(static_cast<size_t>(bytes), 1);
  const double copy = median_us(9, [&] { std::memcpy(to.data(), from.data(), from.size()); });
  print("unshard of " + size_name(bytes), "GB/s", static_cast<double>(bytes) / time / 1e3,
        static_cast<double>(bytes) / copy / 1e3);
}

// From a whole gradient to this rank's: it is read and written once, and the two halves of that are
// read and their sum is written.
void reduce(int64_t bytes) {
  constexpr int64_t kColumns = 1024;
  const int64_t rows = bytes / 4 / kColumns;
  const auto group =
      make_group(at::ones({rows, kColumns}).set_requires_grad(true), fsdp::Layout::kFlat);
  fsdp::GradBuffer grads(group->sharded_params(), /*shard_size=*/2, /*num_ranks=*/2);
  const at::Tensor grad = at::ones({rows, kColumns});
  const fsdp::Stream stream = fsdp::current_stream(c10::kCPU);
  const double time = median_us(9, [&] {
    grads.add(0, grad);
    const auto reduction = fsdp::foreach_reduce(
        {.input = grads.take(/*all=*/false, /*group_number=*/0), .mesh_info = group->mesh_info()},
        {.reduce_scatter = stream, .all_reduce = stream});
    reduction->finish();
    reduction->release_input();
    const_cast<at::Tensor&>(group->params()[0].sharded_param()).mutable_grad().reset();
  });
  at::Tensor whole = at::ones({rows, kColumns}), half = at::ones({rows / 2, kColumns});
  const double floor = median_us(9, [&] {
    whole.copy_(grad);
    at::add_out(half, whole.narrow(0, 0, rows / 2), whole.narrow(0, rows / 2, rows / 2));
  });
  print("reduction of " + size_name(bytes), "GB/s", static_cast<double>(bytes) / time / 1e3,
        static_cast<double>(bytes) / floor / 1e3);
}

}  // namespace

int main() {
  at::set_num_threads(1);
  constexpr int64_t kKiB = 1 << 10, kMiB = 1 << 20;
  for (const int64_t bytes : {4 * kKiB, 256 * kKiB, 4 * kMiB, 64 * kMiB}) {
    collective(2, /*gathers=*/true, at::kFloat, bytes);
    collective(2, /*gathers=*/false, at::kFloat, bytes);
    collective(2, /*gathers=*/false, at::kBFloat16, bytes);
  }
  for (const int64_t bytes : {512 * kKiB, 32 * kMiB}) {
    collective(128, /*gathers=*/true, at::kFloat, bytes);
    collective(128, /*gathers=*/false, at::kFloat, bytes);
  }
  for (const int64_t bytes : {1 * kMiB, 16 * kMiB, 64 * kMiB, 256 * kMiB}) unshard(bytes);
  for (const int64_t bytes : {1 * kMiB, 16 * kMiB, 64 * kMiB, 256 * kMiB}) reduce(bytes);
  return 0;
}
