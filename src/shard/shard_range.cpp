#include "shard/shard_range.h"

#include <algorithm>

namespace fsdp {

ShardRange shard_range(int64_t num_rows, int64_t world_size, int64_t rank) {
  const int64_t padded_rows = (num_rows + world_size - 1) / world_size;
  const int64_t begin = std::min(padded_rows * rank, num_rows);
  const int64_t end = std::min(begin + padded_rows, num_rows);
  return {.begin = begin, .length = end - begin, .padded_rows = padded_rows};
}

}  // namespace fsdp
