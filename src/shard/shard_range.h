#pragma once

#include <cstdint>

namespace fsdp {

/// The rows of a parameter that one rank holds. Pure arithmetic.
struct ShardRange {
  int64_t begin = 0;        ///< first row; equal to the number of rows for an empty shard
  int64_t length = 0;       ///< how many rows, maybe none
  int64_t padded_rows = 0;  ///< rows of the largest shard, which is what every rank gathers
};

/// Cuts `num_rows` rows over `world_size` ranks as torch.chunk does: consecutive runs of
/// ceil(num_rows / world_size), the last one maybe shorter, trailing ranks maybe empty.
[[nodiscard]] ShardRange shard_range(int64_t num_rows, int64_t world_size, int64_t rank);

}  // namespace fsdp
