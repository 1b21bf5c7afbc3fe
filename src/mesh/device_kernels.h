#pragma once

#include <span>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fsdp {

/// A contiguous range of a device's memory.
struct DeviceRange {
  void* data = nullptr;
  c10::Device device = c10::Device(c10::kCPU);
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
};

/// Copies, also between devices of one type, or does nothing where both are the same.
///
/// Streams: the current one of the source's device; between devices both current ones.
void copy_on_device(const DeviceRange& destination, const DeviceRange& source);

/// Reduces with torch's operators to the same bits as reduce_on_host().
///
/// Memory:  a range of the accumulator's dtype for each rank but the first.
/// Streams: the current one of the current device; copies from and to others as copy_on_device().
void reduce_on_device(const DeviceRange& destination, c10d::ReduceOp::RedOpType op,
                      std::span<const DeviceRange> sources, std::span<const double> factors);

}  // namespace fsdp
