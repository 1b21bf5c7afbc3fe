#include "reduce/grad_buffer.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "fsdp/process_group.h"
#include "shard/shard_range.h"
#include "support/layouts.h"
#include "support/messages.h"

namespace fsdp {
namespace {

class GradBufferTest : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(GradBufferTest);

// Parameters that are cut in every way: many rows, one row, none, rows longer than a part, frozen.
std::vector<ParamToShard> make_params() {
  std::vector<ParamToShard> params;
  const auto add = [&](std::vector<int64_t> sizes, bool requires_grad) {
    params.push_back({.tensor = at::zeros(sizes).set_requires_grad(requires_grad),
                      .name = "p" + std::to_string(params.size())});
  };
  add({7, 3}, true);
  add({1}, true);
  add({4, 2}, false);
  add({2, 50}, true);
  add({0, 3}, true);
  add({13}, true);
  return params;
}

FSDPMeshInfo mesh_info() {
  FSDPMeshInfo info;
  info.mesh = init_device_mesh(c10::kCPU);
  return info;
}

at::Tensor grad_of(const FSDPParam& param, double base) {
  const auto& sizes = param.spec()->sizes;
  return (at::arange(c10::multiply_integers(sizes)) + base).view(sizes).to(at::kFloat);
}

// The rows of a whole tensor that `rank` holds.
at::Tensor rows_of(const ShardedTensorSpec& spec, const at::Tensor& whole, int64_t rank) {
  const ShardRange range = flat_shard_range(spec.sizes[0], row_numel(spec.sizes), spec.flat_start,
                                            spec.shard_numel, rank);
  return whole.narrow(0, range.begin, range.length).reshape(-1);
}

// Promise: each rank's chunk holds that rank's rows of every gradient, then the flags, and zeros
// everywhere else, in whatever memory it was given; a second gradient is added (flat), a missing
// one is zeros.
TEST_P(GradBufferTest, ChunksHoldEachRanksRows) {
  for (const int world_size : {1, 2, 3, 5, 8}) {
    run_ranks(world_size, [&](const ProcessGroupPtr& group) {
      ShardedParams params(make_params(), mesh_info(), GetParam(), c10::kCPU);
      GradBuffer buffer(params, world_size, world_size);
      EXPECT_FALSE(buffer.has_grads());
      const bool twice = GetParam() == Layout::kFlat;
      for (const size_t i : {size_t{5}, size_t{0}, size_t{3}}) {
        buffer.add(i, grad_of(params.params()[i], 1));
        // Not contiguous, of another dtype.
        if (twice)
          buffer.add(i, grad_of(params.params()[i], 2).t().contiguous().t().to(at::kDouble));
      }
      EXPECT_TRUE(buffer.has_grads());
      const ReduceInput input = buffer.take(/*all=*/false, /*group_number=*/7);
      EXPECT_FALSE(buffer.has_grads());
      const GradLayout& layout = *input.layout;
      ASSERT_EQ(layout.slots.size(), 5u) << "all but the frozen one";
      at::Tensor rest = input.flat.clone().view({world_size, layout.chunk_numel});
      for (size_t slot = 0; slot < layout.slots.size(); ++slot) {
        const FSDPParam& param = *layout.slots[slot].param;
        const bool has_grad = param.name() != "p1" && param.name() != "p4";
        EXPECT_EQ(input.has_grad[slot] != 0, has_grad);
        at::Tensor grad = grad_of(param, 1);
        if (twice) grad += grad_of(param, 2);
        if (!has_grad) grad.zero_();
        for (int64_t rank = 0; rank < world_size; ++rank) {
          const at::Tensor rows = rows_of(*param.spec(), grad, rank);
          // Where the rows of `rank` begin in its part: what rank itself calls shard_offset.
          const int64_t offset =
              std::clamp<int64_t>(param.spec()->flat_start - rank * param.spec()->shard_numel, 0,
                                  param.spec()->shard_numel - rows.numel());
          at::Tensor part =
              rest[rank].narrow(0, layout.slots[slot].part_offset + offset, rows.numel());
          EXPECT_TRUE(part.equal(rows)) << param.name() << " of rank " << rank;
          part.zero_();
        }
      }
      if (world_size > 1) {
        at::Tensor flags = rest.narrow(1, layout.flags_offset, layout.num_flags);
        const at::Tensor expected = at::tensor({1., 0., 1., 0., 1., 1., 7.}, at::kFloat);
        EXPECT_TRUE(flags.equal(expected.expand_as(flags)));
        flags.zero_();
      } else {
        EXPECT_EQ(layout.num_flags, 0);
      }
      EXPECT_EQ(rest.abs().sum().item<float>(), 0) << "padding that is not zero";
      group->barrier()->wait();
    });
  }
}

// Promise: a gradient of a parameter that was frozen when the buffer was begun is refused, and a
// sparse one is; after the step the buffer follows requires_grad.
TEST_P(GradBufferTest, RefusesWhatItHasNoPlaceFor) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    ShardedParams params(make_params(), mesh_info(), GetParam(), c10::kCPU);
    GradBuffer buffer(params, 2, 2);
    buffer.add(0, grad_of(params.params()[0], 1));
    testing::expect_message<StateError>([&] { buffer.add(2, grad_of(params.params()[2], 1)); },
                                        "'p2' of shape [4, 2] has got a gradient");
    testing::expect_message<ConfigError>(
        [&] { buffer.add(0, grad_of(params.params()[0], 1).to_sparse()); },
        "'p0' of shape [7, 3] is sparse");
    (void)buffer.take(false, 1);
    params.params()[2].sharded_param().set_requires_grad(true);
    buffer.add(2, grad_of(params.params()[2], 1));
    EXPECT_EQ(buffer.take(false, 1).layout->slots.size(), 6u);
  });
}

}  // namespace
}  // namespace fsdp
