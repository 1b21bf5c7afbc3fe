#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "fsdp/module.h"
#include "fsdp/nn.h"
#include "support/random_plan.h"
#include "support/training.h"

// The module of a plan, and its training: sharded, and in one process.
// B batch, I inputs, O outputs of a block.
namespace fsdp::testing {

/// Which forward of the training this is.
struct Turn {
  int step = 0;
  int64_t microbatch = 0;
};

struct RandomBlockImpl : torch::nn::Module {
  RandomBlockImpl(const BlockPlan& plan, at::ScalarType dtype);
  at::Tensor forward(const at::Tensor& x_BI);

  BlockPlan plan;
  std::vector<fsdp::nn::Linear> linears;
  fsdp::nn::LayerNorm norm{nullptr};
  at::Tensor row_I, cube_D1I, scale_1;
  at::Tensor frozen_O;

 private:
  at::Tensor compute(const at::Tensor& x_BI);
};
FSDP_MODULE(RandomBlock);

struct RandomStageImpl : torch::nn::Module {
  explicit RandomStageImpl(std::vector<RandomBlock> blocks);
  at::Tensor forward(const at::Tensor& x_BI, const Turn& turn);

  std::vector<RandomBlock> blocks;
};
FSDP_MODULE(RandomStage);

struct RandomModelImpl : torch::nn::Module {
  explicit RandomModelImpl(const ModelPlan& plan);
  /// Numbers [B, I], or tokens [B] if there is an embedding.
  at::Tensor forward(const at::Tensor& input, const Turn& turn);

  ModelPlan plan;
  fsdp::nn::Embedding embedding{nullptr};
  std::vector<RandomBlock> blocks;
  std::vector<RandomStage> stages;
  fsdp::nn::Linear head{nullptr};
};
FSDP_MODULE(RandomModel);

/// The model with its weights, ties and frozen parameters. Not sharded.
RandomModel build(const ModelPlan& plan);

/// Calls fully_shard() on the modules that the plan names, bottom-up. On every rank.
void shard(RandomModel& model, const ModelPlan& plan, Layout layout);

/// Trains a model that shard() has had on this rank's rows of every batch. The log has whole
/// gradients of every step; undefined ones stay undefined.
TrainingLog train_sharded(RandomModel& model, const ModelPlan& plan, const ProcessGroupPtr& group);

/// The same in this process alone, without fsdp, on the rows of all ranks at once.
///
/// With Precision::kBFloat16Policy: a bf16 copy of the model computes, once for the rows of each
/// rank, since bf16 gradients of a part are rounded for that part; fp32 gradients are their mean.
TrainingLog train_unsharded(const ModelPlan& plan);

}  // namespace fsdp::testing
