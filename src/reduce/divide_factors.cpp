#include "reduce/divide_factors.h"

#include <cmath>

namespace fsdp {
namespace {

std::optional<double> unless_one(double factor) {
  return factor == 1.0 ? std::nullopt : std::optional<double>(factor);
}

// The largest power of two p, reached by doubling while it divides `factor` and factor / p > p.
double pre_divide_factor(double factor) {
  double pre = 1.0;
  while (std::fmod(factor, pre) == 0.0 && factor / pre > pre) pre *= 2.0;
  return pre;
}

}  // namespace

DivideFactors get_gradient_divide_factors(const DivideFactorsRequest& request) {
  const double num_ranks = static_cast<double>(request.shard_size * request.replicate_size);
  const double factor = request.custom_factor.value_or(num_ranks);
  const bool may_overflow =
      request.reduce_dtype != at::kFloat && request.reduce_dtype != at::kBFloat16;

  DivideFactors result;
  if (num_ranks == 1) {
    result.post = unless_one(factor);
  } else if (may_overflow) {
    const double pre = pre_divide_factor(factor);
    result.pre = unless_one(pre);
    result.post = unless_one(factor / pre);
  } else if (request.force_sum) {
    result.post = unless_one(factor);
  } else if (!request.custom_factor) {
    result.reduce_scatter = ReduceKind::kAverage;
    result.all_reduce = ReduceKind::kAverage;
  } else if (factor == static_cast<double>(request.shard_size)) {
    result.reduce_scatter = ReduceKind::kAverage;
  } else if (request.has_premul_sum && request.shard_size > 1) {
    result.reduce_scatter = ReduceKind::kPremulSum;
    result.premul = 1.0 / factor;
  } else {
    result.post = unless_one(factor);
  }
  return result;
}

}  // namespace fsdp
