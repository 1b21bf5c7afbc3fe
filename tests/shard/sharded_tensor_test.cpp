#include "fsdp/sharded_tensor.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "support/messages.h"

namespace fsdp {
namespace {

using WorldAndSizes = std::tuple<int, std::vector<int64_t>>;
class ShardedTensorTest : public ::testing::TestWithParam<WorldAndSizes> {};

// Promise: cut along any dimension that it can be cut along, and gathered again, a tensor is the
// same bit for bit, whatever the dtype; the parts are torch.chunk's.
TEST_P(ShardedTensorTest, DistributeThenGather) {
  const auto& [world_size, sizes] = GetParam();
  run_ranks(world_size, [&, world_size = world_size, sizes = sizes](const ProcessGroupPtr&) {
    const DeviceMeshPtr mesh = init_device_mesh(c10::DeviceType::CPU);
    const int64_t rank = mesh->get_local_rank();
    for (const at::ScalarType dtype :
         {at::kFloat, at::kBFloat16, at::kDouble, at::kLong, at::kByte}) {
      const at::Tensor whole =
          (at::arange(c10::multiply_integers(sizes)) % 251).view(sizes).to(dtype);
      for (int64_t dim = 0; dim < whole.dim(); ++dim) {
        if (dim > 0 && sizes[dim] % world_size != 0) continue;
        const at::Tensor part = distribute_tensor(whole, mesh, {.dim = dim});
        const auto chunks = whole.chunk(world_size, dim);
        if (rank < static_cast<int64_t>(chunks.size())) {
          EXPECT_TRUE(part.equal(chunks[rank]));
        } else {
          EXPECT_EQ(part.numel(), 0);
          EXPECT_EQ(part.size(dim), 0);
        }
        EXPECT_TRUE(full_tensor(part).equal(whole)) << dtype << " dim " << dim;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, ShardedTensorTest,
    ::testing::Combine(::testing::Values(1, 2, 3, 5, 8),
                       ::testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{7},
                                         std::vector<int64_t>{6, 4}, std::vector<int64_t>{3, 8, 2},
                                         std::vector<int64_t>{5, 3, 15}, std::vector<int64_t>{0, 4},
                                         std::vector<int64_t>{4, 0})));

// Promise: the specification survives detach and in-place work, and says what this rank holds.
TEST(ShardedTensor, SpecSaysWhatThisRankHolds) {
  run_ranks(4, [](const ProcessGroupPtr& group) {
    const DeviceMeshPtr mesh = init_device_mesh(c10::DeviceType::CPU);
    at::Tensor part = distribute_tensor(at::zeros({6, 3}), mesh);
    part.add_(1);
    const ShardedTensorSpec* spec = spec_of(part.detach());
    ASSERT_NE(spec, nullptr);
    EXPECT_EQ(spec->sizes, (std::vector<int64_t>{6, 3}));
    EXPECT_EQ(spec->row_begin, std::min(2 * group->getRank(), 6));
    EXPECT_EQ(spec->num_rows, group->getRank() < 3 ? 2 : 0);
    EXPECT_EQ(spec->shard_numel, 6);
    EXPECT_EQ(spec_of(at::zeros({2})), nullptr);
    EXPECT_EQ(spec_of(at::Tensor()), nullptr);
  });
}

// Promise: what cannot be cut is refused, with the numbers and the way out.
TEST(ShardedTensor, Errors) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    const DeviceMeshPtr mesh = init_device_mesh(c10::DeviceType::CPU);
    testing::expect_message<ConfigError>([&] { (void)distribute_tensor(at::zeros({}), mesh); },
                                         "Change it to a 1-D tensor");
    testing::expect_message<ConfigError>(
        [&] {
          (void)distribute_tensor(at::zeros({4, 3}), mesh, {.dim = 1});
        },
        "its size 3 is not a multiple of the shard mesh size 2");
    testing::expect_message<ConfigError>(
        [&] {
          (void)distribute_tensor(at::zeros({4, 3}), mesh, {.dim = 2});
        },
        "it has dimensions -2 to 1");
    testing::expect_message<ConfigError>([&] { (void)distribute_tensor(at::zeros({4}), nullptr); },
                                         "the mesh is null");
  });
}

}  // namespace
}  // namespace fsdp
