#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fsdp::testing {

/// What PREMUL_SUM multiplies the values of a rank with.
inline double factor_of(int rank) { return 0.25 * (rank + 1); }

/// The reduction of a type, as `rank` asks for it.
inline c10d::ReduceOp reduce_op(c10d::ReduceOp::RedOpType type, int rank) {
  if (type != c10d::ReduceOp::PREMUL_SUM) return c10d::ReduceOp(type);
  c10d::ReduceOp op;
  op.op_ = type;
  op.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(factor_of(rank));
  return op;
}

}  // namespace fsdp::testing
