#pragma once

#include <cstdint>
#include <optional>

#include <c10/core/ScalarType.h>

namespace fsdp {

enum class ReduceKind { kSum, kAverage, kPremulSum };

/// How a reduction of gradients becomes a mean. Pure arithmetic.
struct DivideFactors {
  std::optional<double> pre;   ///< divide before the reduce-scatter
  std::optional<double> post;  ///< divide at the end
  ReduceKind reduce_scatter = ReduceKind::kSum;
  ReduceKind all_reduce = ReduceKind::kSum;
  double premul = 1.0;  ///< with kPremulSum: each rank's gradient times this, in the collective
};

struct DivideFactorsRequest {
  int64_t shard_size = 1;
  int64_t replicate_size = 1;
  at::ScalarType reduce_dtype = at::kFloat;
  std::optional<double> custom_factor;  ///< divide by this instead of the number of ranks
  bool force_sum = false;               ///< no AVG in the collectives
  bool has_premul_sum = false;          ///< whether the backend can multiply before it sums
};

/// In fp32 and bf16 the collectives average. Other dtypes may overflow while summing: part of the
/// factor divides before, a power of two near its square root, the rest after.
///
/// A factor that divides by exactly 1 is left out. One rank divides once, by a custom factor only
/// (PyTorch 2.13 divides twice there; docs/parity.md).
/// Source: PyTorch 2.13, _fsdp_collectives._get_gradient_divide_factors.
[[nodiscard]] DivideFactors get_gradient_divide_factors(const DivideFactorsRequest& request);

}  // namespace fsdp
