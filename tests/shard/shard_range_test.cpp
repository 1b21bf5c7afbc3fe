#include "shard/shard_range.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/chunk.h>
#include <gtest/gtest.h>

namespace fsdp {
namespace {

// Promise: rows are cut as torch.chunk cuts them, for all small sizes, padded to the first chunk.
TEST(ShardRange, CutsAsTorchChunkDoes) {
  for (int64_t rows = 1; rows <= 40; ++rows) {
    for (int64_t world_size = 1; world_size <= 40; ++world_size) {
      const std::vector<at::Tensor> chunks = at::arange(rows).chunk(world_size);
      for (int64_t rank = 0; rank < world_size; ++rank) {
        const ShardRange range = shard_range(rows, world_size, rank);
        EXPECT_EQ(range.padded_rows, chunks[0].numel());
        if (rank < static_cast<int64_t>(chunks.size())) {
          EXPECT_EQ(range.length, chunks[rank].numel());
          EXPECT_EQ(range.begin, chunks[rank][0].item<int64_t>());
        } else {
          EXPECT_EQ(range.length, 0);
          EXPECT_EQ(range.begin, rows);
        }
      }
    }
  }
}

// Promise: the sizes that FSDP2's documentation of uneven sharding gives.
TEST(ShardRange, KnownSizes) {
  const int64_t expected[] = {2, 2, 2, 0};  // 6 rows over 4
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(shard_range(6, 4, rank).length, expected[rank]);
  EXPECT_EQ(shard_range(17, 128, 16).length, 1);
  EXPECT_EQ(shard_range(17, 128, 17).length, 0);
  EXPECT_EQ(shard_range(0, 3, 1).padded_rows, 0);
}

}  // namespace
}  // namespace fsdp
