#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "sim/race_detector.h"

namespace fsdp::sim {

/// Makes npus use the CPU's kernel of each operator that has one. Once, at the start.
void use_cpu_kernels();

/// Adds the bytes that a tensor's elements lie in: one range where they are dense, one a row else.
void add_bytes(std::vector<Bytes>& bytes, const at::Tensor& tensor, bool is_write);

/// A CPU tensor over the same bytes as `tensor`. It does not keep them: like a kernel's pointer, it
/// stays valid when the tensor is freed, and then sees what the memory is used for next.
[[nodiscard]] at::Tensor host_alias(const at::Tensor& tensor);

}  // namespace fsdp::sim
