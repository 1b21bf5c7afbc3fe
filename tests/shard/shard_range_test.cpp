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
        EXPECT_EQ(chunk_rows(rows, world_size), chunks[0].numel());
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
  EXPECT_EQ(chunk_rows(0, 3), 0);
}

// Promise: in a flat buffer a rank holds the rows that lie in its part; a buffer of a parameter
// alone is cut as torch.chunk cuts it.
TEST(ShardRange, FlatPartsHoldWholeRows) {
  // Four rows of 3 from element 2 on, in parts of 8: row 0 and 1 | row 2 and 3 lie in [8, 14) | -.
  const int64_t begins[] = {0, 2, 4};
  const int64_t lengths[] = {2, 2, 0};
  for (int64_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(flat_shard_range(4, 3, 2, 8, rank).begin, begins[rank]);
    EXPECT_EQ(flat_shard_range(4, 3, 2, 8, rank).length, lengths[rank]);
  }
  for (int64_t rows = 0; rows <= 12; ++rows) {
    for (int64_t row_numel = 1; row_numel <= 3; ++row_numel) {
      for (int64_t world_size = 1; world_size <= 13; ++world_size) {
        const int64_t shard_numel = chunk_rows(rows, world_size) * row_numel;
        for (int64_t rank = 0; rank < world_size; ++rank) {
          const ShardRange flat = flat_shard_range(rows, row_numel, 0, shard_numel, rank);
          const ShardRange alone = shard_range(rows, world_size, rank);
          EXPECT_EQ(flat.begin, alone.begin);
          EXPECT_EQ(flat.length, alone.length);
        }
      }
    }
  }
  EXPECT_EQ(flat_shard_range(5, 0, 7, 4, 0).length, 5);
  EXPECT_EQ(flat_shard_range(5, 0, 7, 4, 1).length, 0);
}

}  // namespace
}  // namespace fsdp
