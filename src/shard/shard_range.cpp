#include "shard/shard_range.h"

#include <algorithm>

namespace fsdp {

int64_t chunk_rows(int64_t num_rows, int64_t world_size) {
  return (num_rows + world_size - 1) / world_size;
}

ShardRange shard_range(int64_t num_rows, int64_t world_size, int64_t rank) {
  const int64_t rows = chunk_rows(num_rows, world_size);
  const int64_t begin = std::min(rows * rank, num_rows);
  return {.begin = begin, .length = std::min(begin + rows, num_rows) - begin};
}

ShardRange flat_shard_range(int64_t num_rows, int64_t row_numel, int64_t start, int64_t shard_numel,
                            int64_t rank) {
  if (row_numel == 0)
    return {.begin = rank == 0 ? 0 : num_rows, .length = rank == 0 ? num_rows : 0};
  const auto rows_before = [&](int64_t element) {
    return std::clamp<int64_t>(element - start, 0, num_rows * row_numel) / row_numel;
  };
  const int64_t begin = rows_before(rank * shard_numel);
  return {.begin = begin, .length = rows_before((rank + 1) * shard_numel) - begin};
}

}  // namespace fsdp
