#include "shard/flat_param.h"

#include <ATen/ops/zeros.h>

namespace fsdp {

FlatParam::FlatParam(int64_t shard_numel, int64_t world_size, at::ScalarType dtype,
                     c10::Device device)
    : shard_numel_(shard_numel),
      world_size_(world_size),
      shard_(at::zeros({shard_numel}, at::TensorOptions().dtype(dtype).device(device))) {}

void FlatParam::keep_post_forward_shard(int64_t world_size, int64_t rank) {
  TORCH_INTERNAL_ASSERT(unsharded_numel() % world_size == 0);
  const int64_t numel = unsharded_numel() / world_size;
  post_forward_shard_ = unsharded_.narrow(0, numel * rank, numel).clone();
}

}  // namespace fsdp
