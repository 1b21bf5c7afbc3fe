#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/stream.h"
#include "fsdp/sharded_tensor.h"
#include "mesh/work.h"
#include "reduce/reduce_scatter.h"
#include "reference/world.h"
#include "support/layouts.h"
#include "unshard/all_gather.h"

// Class CollectiveOps of the reference suite (docs/parity.md): the collectives of one group, called
// directly, on 128 ranks, most of which hold nothing of most parameters.

namespace fsdp {
namespace {

constexpr int kWorldSize = 128;

std::vector<at::Tensor> original_params() {
  const std::vector<std::vector<int64_t>> sizes = {{17, 257}, {17},      {64, 312}, {64},
                                                   {64, 64},  {512, 64}, {256},     {64, 297}};
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(42);
  std::vector<at::Tensor> params;
  for (const auto& size : sizes) params.push_back(at::randn(size, generator));
  return params;
}

std::vector<ParamToShard> clones_of(const std::vector<at::Tensor>& params) {
  std::vector<ParamToShard> clones;
  for (size_t i = 0; i < params.size(); ++i) {
    clones.push_back(
        {.tensor = params[i].clone().set_requires_grad(true), .name = "param" + std::to_string(i)});
  }
  return clones;
}

FSDPMeshInfoPtr world_mesh() {
  FSDPMeshInfo info;
  info.mesh = init_device_mesh(c10::kCPU);
  return std::make_shared<const FSDPMeshInfo>(std::move(info));
}

class CollectiveOps : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(CollectiveOps);

struct GatherCase {
  bool async_op;
  bool side_streams;
  ReshardAfterForward reshard_after_forward;
};

void all_gather(ShardedParams& params, const FSDPMeshInfo& mesh_info, const GatherCase& options) {
  const Stream current = current_stream(c10::kCPU);
  AllGatherStreams streams{.copy_in = current, .all_gather = current};
  if (options.side_streams) {
    streams = {.copy_in = new_stream(c10::kCPU, /*high_priority=*/true),
               .all_gather = new_stream(c10::kCPU, /*high_priority=*/true)};
    streams.copy_in.wait(current);
  }
  AllGatherResult result = foreach_all_gather(
      params, mesh_info.shard_group(), mesh_info.shard_size(), mesh_info.shard_rank(), streams);
  if (!options.async_op && result.work) {
    wait_for(*result.work, *result.group, "all-gather");
    result.work.reset();
  }
  foreach_all_gather_copy_out(result, params);
}

// Promise: all ranks' shards make the original parameters again, bit for bit, for every way of
// issuing the gather; also from the parts that a reshard to groups of 8 ranks keeps.
TEST_P(CollectiveOps, test_all_gather_fp32) {
  const std::vector<at::Tensor> originals = original_params();
  const GatherCase cases[] = {{false, false, true},
                              {false, true, true},
                              {false, true, int64_t{8}},
                              {true, false, true},
                              {true, true, true}};
  testing::run_world(kWorldSize, [&](const ProcessGroupPtr&) {
    const FSDPMeshInfoPtr mesh_info = world_mesh();
    for (const GatherCase& options : cases) {
      ShardedParams params(clones_of(originals), *mesh_info, GetParam(), c10::kCPU);
      for (size_t i = 0; i < originals.size(); ++i) {
        const at::Tensor& sharded = params.params()[i].sharded_param();
        ASSERT_NE(spec_of(sharded), nullptr);
        EXPECT_TRUE(full_tensor(sharded).equal(originals[i])) << i;
      }
      all_gather(params, *mesh_info, options);
      for (size_t i = 0; i < originals.size(); ++i) {
        EXPECT_TRUE(params.params()[i].unsharded_param().equal(originals[i])) << i;
      }
      const FSDPMeshInfoPtr post_forward =
          get_post_forward_mesh_info(options.reshard_after_forward, mesh_info);
      if (post_forward == mesh_info) continue;
      ASSERT_EQ(post_forward->shard_size(), 8);
      ASSERT_EQ(post_forward->replicate_size(), 16);
      params.keep_post_forward_shards(post_forward->shard_size(), post_forward->shard_rank());
      EXPECT_ANY_THROW(params.params()[0].unsharded_param().sum());
      all_gather(params, *post_forward, options);
      for (size_t i = 0; i < originals.size(); ++i) {
        EXPECT_TRUE(params.params()[i].unsharded_param().equal(originals[i])) << i;
      }
    }
  });
}

// The mean gradient of each parameter, by all-reduces of whole gradients, in `dtype`.
std::vector<at::Tensor> reference_grads(const std::vector<at::Tensor>& grads, at::ScalarType dtype,
                                        const ProcessGroupPtr& group) {
  const DivideFactors factors =
      get_gradient_divide_factors({.shard_size = kWorldSize, .reduce_dtype = dtype});
  std::vector<at::Tensor> result;
  for (const at::Tensor& grad : grads) {
    std::vector<at::Tensor> tensors{grad.to(dtype, /*non_blocking=*/false, /*copy=*/true)};
    if (factors.pre) tensors[0].div_(*factors.pre);
    c10d::AllreduceOptions options;
    options.reduceOp = factors.pre ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG;
    group->allreduce(tensors, options)->wait();
    if (factors.post) tensors[0].div_(*factors.post);
    result.push_back(tensors[0].to(at::kFloat));
  }
  return result;
}

// Gradients of rank % 8, so that every sum is exact in fp16 too: the mean is 3.5 everywhere. The
// reference is made before the reduction takes the gradients.
void expect_mean_gradients(Layout layout, at::ScalarType reduce_dtype) {
  const std::vector<at::Tensor> originals = original_params();
  testing::run_world(kWorldSize, [&](const ProcessGroupPtr& group) {
    const FSDPMeshInfoPtr mesh_info = world_mesh();
    for (const bool side_stream : {false, true}) {
      ShardedParams params(clones_of(originals), *mesh_info, layout, c10::kCPU);
      params.init_dtypes({.reduce_dtype = reduce_dtype});
      std::vector<at::Tensor> grads;
      for (const at::Tensor& param : originals) {
        grads.push_back(at::full(param.sizes(), group->getRank() % 8, at::kFloat));
      }
      const std::vector<at::Tensor> expected = reference_grads(grads, reduce_dtype, group);

      GradBuffer buffer(params, kWorldSize, kWorldSize);
      for (size_t i = 0; i < grads.size(); ++i) buffer.add(i, grads[i]);
      const Stream current = current_stream(c10::kCPU);
      const Stream reduce_stream =
          side_stream ? new_stream(c10::kCPU, /*high_priority=*/true) : current;
      Reduction reduction(
          {.input = buffer.take(/*all=*/false, /*group_number=*/1), .mesh_info = mesh_info},
          {.reduce_scatter = reduce_stream, .all_reduce = current});
      reduction.finish();
      current.wait(reduction.post_reduce());
      for (size_t i = 0; i < grads.size(); ++i) {
        const at::Tensor& grad = params.params()[i].sharded_param().grad();
        ASSERT_NE(spec_of(grad), nullptr);  // also where this rank holds nothing
        EXPECT_EQ(grad.scalar_type(), at::kFloat);
        const at::Tensor whole = full_tensor(grad);
        EXPECT_TRUE(whole.equal(expected[i])) << i;
        EXPECT_TRUE(whole.equal(at::full(whole.sizes(), 3.5, at::kFloat))) << i;
      }
    }
  });
}

TEST_P(CollectiveOps, test_reduce_scatter_fp32) { expect_mean_gradients(GetParam(), at::kFloat); }
TEST_P(CollectiveOps, test_reduce_scatter_fp16) { expect_mean_gradients(GetParam(), at::kHalf); }

}  // namespace
}  // namespace fsdp
