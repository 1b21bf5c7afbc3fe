#pragma once

#include <cstdint>

namespace fsdp {

/// The rows of a parameter that one rank holds. Pure arithmetic.
struct ShardRange {
  int64_t begin = 0;   ///< first row; equal to the number of rows for an empty shard behind them
  int64_t length = 0;  ///< how many rows, maybe none
};

/// Cuts `num_rows` rows over ranks as torch.chunk does: consecutive runs of chunk_rows(), the last
/// one maybe shorter, trailing ranks maybe empty.
[[nodiscard]] ShardRange shard_range(int64_t num_rows, int64_t world_size, int64_t rank);
[[nodiscard]] int64_t chunk_rows(int64_t num_rows, int64_t world_size);

/// The smallest multiple of `multiple` that is not less than `value`.
[[nodiscard]] inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// The rows of a parameter that lie in the part of `rank` of a flat buffer, of which rank r owns
/// the elements [r * shard_numel, (r + 1) * shard_numel). The parameter begins at element `start`;
/// no boundary cuts one of its rows of `row_numel` elements. Rows without elements are rank 0's.
[[nodiscard]] ShardRange flat_shard_range(int64_t num_rows, int64_t row_numel, int64_t start,
                                          int64_t shard_numel, int64_t rank);

}  // namespace fsdp
