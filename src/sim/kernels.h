#pragma once

namespace fsdp::sim {

/// Makes npus use the CPU's kernel of each operator that has one. Once, at the start.
void use_cpu_kernels();

}  // namespace fsdp::sim
