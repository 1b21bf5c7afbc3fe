#pragma once

#include <chrono>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/add.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "fsdp/device_mesh.h"

// Collectives of a rank that is alone: benchmarks of what surrounds them.
namespace fsdp::bench {

class DoneWork final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

enum class Collectives {
  kNothing,  ///< a reduction gives this rank's own gradients, since what it gives is looked at
  kMemory,   ///< what a rank has to read and write at least: each part is this rank's
};

class LocalBackend final : public c10d::Backend {
 public:
  LocalBackend(int size, Collectives collectives)
      : c10d::Backend(/*rank=*/0, size), collectives_(collectives) {}

  const std::string getBackendName() const override { return "local"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    if (collectives_ == Collectives::kMemory) {
      auto* to = static_cast<char*>(output.mutable_data_ptr());
      for (int i = 0; i < size_; ++i, to += input.nbytes()) {
        if (to != input.const_data_ptr()) std::memcpy(to, input.const_data_ptr(), input.nbytes());
      }
    }
    return c10::make_intrusive<DoneWork>();
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions&) override {
    if (collectives_ == Collectives::kMemory && size_ == 2) {
      at::add_out(output, input.narrow(0, 0, output.numel()),
                  input.narrow(0, output.numel(), output.numel()));
    } else {
      std::memcpy(output.mutable_data_ptr(), input.const_data_ptr(), output.nbytes());
    }
    return c10::make_intrusive<DoneWork>();
  }

 private:
  Collectives collectives_;
};

inline ProcessGroupPtr local_group(int world_size, Collectives collectives) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(/*rank=*/0, world_size);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<LocalBackend>(world_size, collectives));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

inline DeviceMeshPtr mesh_of(const ProcessGroupPtr& group) {
  return std::make_shared<const DeviceMesh>(c10::kCPU, std::vector<int64_t>{group->getSize()},
                                            std::vector<std::string>{}, group);
}

/// Microseconds: of this process, all threads; and of the clock on the wall.
inline double cpu_us() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}
inline double wall_us() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

}  // namespace fsdp::bench
