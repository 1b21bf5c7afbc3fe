#include "reduce/divide_factors.h"

#include <gtest/gtest.h>

namespace fsdp {
namespace {

constexpr auto kNone = std::nullopt;

DivideFactors factors(int64_t shard_size, int64_t replicate_size, at::ScalarType dtype,
                      std::optional<double> custom = kNone, bool force_sum = false,
                      bool has_premul_sum = true) {
  return get_gradient_divide_factors({.shard_size = shard_size,
                                      .replicate_size = replicate_size,
                                      .reduce_dtype = dtype,
                                      .custom_factor = custom,
                                      .force_sum = force_sum,
                                      .has_premul_sum = has_premul_sum});
}

// Promise: in fp16 the division is split, as PyTorch 2.13 splits it.
TEST(DivideFactors, OverflowRiskSplits) {
  struct Row {
    int64_t ranks;
    double pre, post;
  };
  for (const Row& row : {Row{2, 2, 1}, Row{3, 2, 1.5}, Row{4, 2, 2}, Row{6, 4, 1.5}, Row{8, 4, 2},
                         Row{12, 4, 3}, Row{128, 16, 8}}) {
    for (const at::ScalarType dtype : {at::kHalf, at::kDouble}) {
      const DivideFactors result = factors(row.ranks, 1, dtype);
      EXPECT_EQ(result.pre.value_or(1), row.pre) << row.ranks;
      EXPECT_EQ(result.post.value_or(1), row.post) << row.ranks;
      EXPECT_EQ(result.reduce_scatter, ReduceKind::kSum);
      EXPECT_EQ(result.all_reduce, ReduceKind::kSum);
    }
  }
  const DivideFactors half = factors(2, 1, at::kHalf, 0.5);
  EXPECT_EQ(half.pre, kNone);
  EXPECT_EQ(half.post, 0.5);
}

// Promise: in fp32 and bf16 the collectives average.
TEST(DivideFactors, SafeDtypesAverage) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const DivideFactors plain = factors(4, 2, dtype);
    EXPECT_EQ(plain.reduce_scatter, ReduceKind::kAverage);
    EXPECT_EQ(plain.all_reduce, ReduceKind::kAverage);
    EXPECT_FALSE(plain.pre || plain.post);

    const DivideFactors shard_size = factors(4, 2, dtype, 4);
    EXPECT_EQ(shard_size.reduce_scatter, ReduceKind::kAverage);
    EXPECT_EQ(shard_size.all_reduce, ReduceKind::kSum);

    const DivideFactors custom = factors(4, 2, dtype, 5);
    EXPECT_EQ(custom.reduce_scatter, ReduceKind::kPremulSum);
    EXPECT_EQ(custom.premul, 1.0 / 5);

    const DivideFactors no_premul = factors(4, 2, dtype, 5, /*force_sum=*/false, false);
    EXPECT_EQ(no_premul.reduce_scatter, ReduceKind::kSum);
    EXPECT_EQ(no_premul.post, 5);

    const DivideFactors forced = factors(4, 2, dtype, kNone, /*force_sum=*/true);
    EXPECT_EQ(forced.reduce_scatter, ReduceKind::kSum);
    EXPECT_EQ(forced.post, 8);
  }
}

// Promise: over all ways the product of what divides is the factor, once. (PyTorch 2.13 divides
// twice with one rank.)
TEST(DivideFactors, DividesOnce) {
  for (const int64_t shard : {1, 2, 3, 8}) {
    for (const int64_t replicate : {1, 2, 5}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
        for (const std::optional<double> custom :
             {std::optional<double>(), std::optional<double>(6), std::optional<double>(1)}) {
          for (const bool force_sum : {false, true}) {
            for (const bool premul : {false, true}) {
              const DivideFactors result =
                  factors(shard, replicate, dtype, custom, force_sum, premul);
              double divides = result.pre.value_or(1) * result.post.value_or(1);
              if (shard > 1) {  // with one rank there is no reduce-scatter
                if (result.reduce_scatter == ReduceKind::kAverage) divides *= shard;
                if (result.reduce_scatter == ReduceKind::kPremulSum) divides /= result.premul;
              }
              if (result.all_reduce == ReduceKind::kAverage) divides *= replicate;
              EXPECT_DOUBLE_EQ(divides, custom.value_or(shard * replicate))
                  << shard << "x" << replicate << " " << dtype << " force_sum " << force_sum;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fsdp
