#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <c10/core/ScalarType.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fsdp {

/// One output that is reduced from the same range of every rank's memory.
struct HostReduction {
  at::ScalarType dtype = at::kFloat;
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
  std::span<const void* const> sources;  ///< one per rank, in rank order
  std::span<const double> factors;       ///< one per rank; read by PREMUL_SUM only
  void* destination = nullptr;           ///< may be one of the sources
  int64_t numel = 0;
};

/// Refuses reductions that have no meaning for a dtype.
///
/// Errors:  ConfigError that names `function`, the operation and the dtype.
void check_reduction(std::string_view function, c10d::ReduceOp::RedOpType op, at::ScalarType dtype);

/// Reduces in one pass over the sources, in rank order: the same bits every time.
///
/// Half precision is accumulated in float and rounded once. Integers wrap; AVG of integers is cut
/// towards zero; for bool SUM and MAX mean "or", PRODUCT and MIN mean "and".
/// Source:  rounding and integer rules as NCCL 2.27 (ncclSum, ncclAvg).
void reduce_on_host(const HostReduction& reduction);

/// Copies, or does nothing where source and destination are the same.
void copy_on_host(void* destination, const void* source, int64_t bytes);

[[nodiscard]] std::string_view reduce_op_name(c10d::ReduceOp::RedOpType op);

}  // namespace fsdp
