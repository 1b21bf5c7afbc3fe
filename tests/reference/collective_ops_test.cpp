#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/stream.h"
#include "fsdp/sharded_tensor.h"
#include "reduce/grad_buffer.h"
#include "reduce/reduce_scatter.h"
#include "reference/world.h"
#include "schedule/fsdp_param_group.h"
#include "shard/storage.h"
#include "support/layouts.h"
#include "unshard/all_gather.h"

// Class CollectiveOps of the reference suite (docs/parity.md): the collectives of one group, called
// directly, on 128 ranks, most of which hold nothing of most parameters.

namespace fsdp {
namespace {

constexpr int kWorldSize = 128;
constexpr int64_t kPostForwardSize = 8;

std::vector<at::Tensor> original_params() {
  const std::vector<std::vector<int64_t>> sizes = {{17, 257}, {17},      {64, 312}, {64},
                                                   {64, 64},  {512, 64}, {256},     {64, 297}};
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(42);
  std::vector<at::Tensor> params;
  for (const auto& size : sizes) params.push_back(at::randn(size, generator));
  return params;
}

// The group of clones of `params`, as fully_shard() makes it.
std::shared_ptr<FSDPParamGroup> make_group(const std::vector<at::Tensor>& params, Layout layout,
                                           const ReshardAfterForward& reshard_after_forward,
                                           const MixedPrecisionPolicy& mp_policy = {}) {
  std::vector<ParamToShard> clones;
  for (size_t i = 0; i < params.size(); ++i) {
    clones.push_back(
        {.tensor = params[i].clone().set_requires_grad(true), .name = "param" + std::to_string(i)});
  }
  const auto mesh_info =
      std::make_shared<const FSDPMeshInfo>(FSDPMeshInfo{.mesh = testing::make_mesh()});
  auto group = std::make_shared<FSDPParamGroup>(
      clones, mesh_info, layout, testing::suite_device(),
      GroupSettings{
          .mp_policy = mp_policy,
          .post_forward_mesh_info = get_post_forward_mesh_info(reshard_after_forward, mesh_info)});
  group->lazy_init();
  return group;
}

class CollectiveOps : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(CollectiveOps);

struct GatherCase {
  bool async_op;
  bool side_streams;
  ReshardAfterForward reshard_after_forward;
};

// The gather alone, from the shards that the group's state says.
void all_gather(FSDPParamGroup& group, const ProcessGroupPtr& process_group, bool async_op,
                const AllGatherStreams& streams) {
  AllGatherResult result =
      foreach_all_gather(group.sharded_params(), process_group, async_op, streams);
  if (has_streams(testing::suite_device().type())) {
    EXPECT_EQ(result.work != nullptr, async_op);  // else the stream waits already
  }
  foreach_all_gather_copy_out(result, group.sharded_params());
  EXPECT_EQ(result.work, nullptr);
  for (FSDPParam& param : group.params()) param.init_unsharded_param();
  group.to_unsharded();
}

void expect_unsharded(FSDPParamGroup& group, const std::vector<at::Tensor>& originals) {
  EXPECT_EQ(group.sharded_state(), ShardedState::kUnsharded);
  for (size_t i = 0; i < originals.size(); ++i) {
    const at::Tensor& param = group.params()[i].unsharded_param();
    EXPECT_EQ(spec_of(param), nullptr) << i;  // a plain tensor
    EXPECT_TRUE(param.is_leaf() && param.requires_grad()) << i;
    EXPECT_EQ(param.device(), testing::suite_device()) << i;
    EXPECT_TRUE(param.detach().cpu().equal(originals[i])) << i;
  }
}

// Promise: all ranks' shards make the original parameters again, bit for bit, for every way of
// issuing the gather; also from the parts that a reshard to groups of 8 ranks keeps.
TEST_P(CollectiveOps, test_all_gather_fp32) {
  const std::vector<at::Tensor> originals = original_params();
  const GatherCase cases[] = {{false, false, true},
                              {false, true, true},
                              {false, true, kPostForwardSize},
                              {true, false, true},
                              {true, true, true}};
  testing::run_world(kWorldSize, [&](const ProcessGroupPtr&) {
    const c10::Device device = testing::suite_device();
    for (const GatherCase& options : cases) {
      const Stream current = current_stream(device);
      AllGatherStreams streams{.copy_in = current, .all_gather = current};
      if (options.side_streams) {
        streams = {.copy_in = new_stream(device, /*high_priority=*/true),
                   .all_gather = new_stream(device, /*high_priority=*/true)};
      }
      const auto side_streams_wait = [&] {
        streams.copy_in.wait(current);
        streams.all_gather.wait(current);
      };
      const auto group = make_group(originals, GetParam(), options.reshard_after_forward);
      EXPECT_EQ(group->sharded_state(), ShardedState::kSharded);
      for (size_t i = 0; i < originals.size(); ++i) {
        const at::Tensor& sharded = group->params()[i].sharded_param();
        ASSERT_NE(spec_of(sharded), nullptr);
        EXPECT_TRUE(full_tensor(sharded).cpu().equal(originals[i])) << i;
      }
      side_streams_wait();
      all_gather(*group, group->mesh_info()->shard_group(), options.async_op, streams);
      expect_unsharded(*group, originals);

      const FSDPMeshInfoPtr& post_forward = group->settings().post_forward_mesh_info;
      if (post_forward == group->mesh_info()) continue;
      ASSERT_EQ(post_forward->shard_size(), kPostForwardSize);
      ASSERT_EQ(post_forward->replicate_size(), kWorldSize / kPostForwardSize);
      group->to_sharded_post_forward();
      EXPECT_EQ(group->sharded_state(), ShardedState::kShardedPostForward);
      for (const FSDPParam& param : group->params()) {
        EXPECT_FALSE(is_allocated(param.unsharded_param().storage()));
      }
      side_streams_wait();  // for the copies of the parts
      all_gather(*group, post_forward->shard_group(), options.async_op, streams);
      expect_unsharded(*group, originals);
    }
  });
}

// Promise: in FSDP2's layout the buffers are FSDP2's, element by element: of each parameter the
// padded part of a rank, and of a post-forward shard an eighth of the padded whole.
TEST(CollectiveOpsLayout, per_parameter_buffers_are_those_of_fsdp2) {
  const std::vector<int64_t> parts{257, 1, 312, 1, 64, 256, 2, 297};
  const std::vector<int64_t> post_forward_parts{4112, 16, 4992, 16, 1024, 4096, 32, 4752};
  testing::run_world(kWorldSize, [&](const ProcessGroupPtr&) {
    const Stream current = current_stream(testing::suite_device());
    const auto group = make_group(original_params(), Layout::kPerParameter, kPostForwardSize);
    const auto gather = [&](const ProcessGroupPtr& process_group) {
      AllGatherResult result =
          foreach_all_gather(group->sharded_params(), process_group, /*async_op=*/false,
                             {.copy_in = current, .all_gather = current});
      std::vector<int64_t> numels;
      for (const int64_t bytes : result.part_bytes) numels.push_back(bytes / sizeof(float));
      EXPECT_EQ(result.buffer.numel(), 152320);
      foreach_all_gather_copy_out(result, group->sharded_params());
      group->to_unsharded();
      return numels;
    };
    EXPECT_EQ(gather(group->mesh_info()->shard_group()), parts);
    group->to_sharded_post_forward();
    EXPECT_EQ(gather(group->settings().post_forward_mesh_info->shard_group()), post_forward_parts);
  });
}

// The mean gradient of each parameter, by all-reduces of whole gradients, in `dtype`.
std::vector<at::Tensor> reference_grads(const std::vector<at::Tensor>& grads, at::ScalarType dtype,
                                        const DivideFactors& factors,
                                        const ProcessGroupPtr& group) {
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
  const DivideFactors factors =
      get_gradient_divide_factors({.shard_size = kWorldSize, .reduce_dtype = reduce_dtype});
  if (reduce_dtype == at::kHalf) {
    EXPECT_EQ(factors.pre, 16);
    EXPECT_EQ(factors.post, 8);
    EXPECT_EQ(factors.reduce_scatter, ReduceKind::kSum);
  } else {
    EXPECT_EQ(factors.reduce_scatter, ReduceKind::kAverage);
  }
  testing::run_world(kWorldSize, [&](const ProcessGroupPtr& world) {
    const c10::Device device = testing::suite_device();
    const Stream current = current_stream(device);
    for (const bool side_stream : {false, true}) {
      const auto group = make_group(originals, layout, /*reshard_after_forward=*/true,
                                    {.reduce_dtype = reduce_dtype});
      group->unshard();
      group->wait_for_unshard();
      group->reshard();
      std::vector<at::Tensor> grads;
      for (const at::Tensor& param : originals) {
        grads.push_back(at::full(param.sizes(), world->getRank() % 8, at::kFloat).to(device));
      }
      const std::vector<at::Tensor> expected = reference_grads(grads, reduce_dtype, factors, world);

      GradBuffer buffer(group->sharded_params(), kWorldSize, kWorldSize);
      for (size_t i = 0; i < grads.size(); ++i) buffer.add(i, grads[i]);
      grads.clear();
      const Stream reduce_stream =
          side_stream ? new_stream(device, /*high_priority=*/true) : current;
      const auto reduction =
          foreach_reduce({.input = buffer.take(/*all=*/false, /*group_number=*/1),
                          .mesh_info = group->mesh_info()},
                         {.reduce_scatter = reduce_stream,
                          .all_reduce = group->comm().reduce_streams().all_reduce});
      reduction->finish();
      current.wait(reduction->post_reduce());
      for (size_t i = 0; i < originals.size(); ++i) {
        const at::Tensor& grad = group->params()[i].sharded_param().grad();
        ASSERT_NE(spec_of(grad), nullptr);  // also where this rank holds nothing
        EXPECT_EQ(grad.scalar_type(), at::kFloat);
        const at::Tensor whole = full_tensor(grad).cpu();
        EXPECT_TRUE(whole.equal(expected[i].cpu())) << i;
        EXPECT_TRUE(whole.equal(at::full(whole.sizes(), 3.5, at::kFloat))) << i;
      }
    }
  });
}

TEST_P(CollectiveOps, test_reduce_scatter_fp32) { expect_mean_gradients(GetParam(), at::kFloat); }
TEST_P(CollectiveOps, test_reduce_scatter_fp16) { expect_mean_gradients(GetParam(), at::kHalf); }

}  // namespace
}  // namespace fsdp
