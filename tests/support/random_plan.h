#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "fsdp/policy.h"
#include "support/training.h"

// What a random model is, how it is sharded and trained: plain data, drawn from a seed.
namespace fsdp::testing {

enum class BlockKind {
  kLinearStack,   ///< linear, linear, ...
  kMlp,           ///< linear, gelu, linear
  kResidual,      ///< x + linear(tanh(linear(x)))
  kLayerNorm,     ///< normalize, scale, shift
  kBranches,      ///< tanh(linear(x)) + linear(x)
  kBareParams,    ///< a 1-D and a 3-D parameter of the block itself
  kScale,         ///< a parameter of one element
  kNoParameters,  ///< tanh
};

enum class Freeze { kNone, kEverySecond, kAll };

/// When a block takes part.
enum class Use {
  kAlways,
  kNever,            ///< its parameters are there, its forward is not called
  kDropped,          ///< forward is called, its result is not used
  kOddSteps,         ///< its parameters get no gradient in the first step
  kFirstMicrobatch,  ///< of several
};

/// Several microbatches a step, and how their gradients come together.
enum class Accumulation { kNone, kNoSync, kSyncEach, kNoAllReduce };

enum class Precision { kFloat, kDouble, kBFloat16Policy };

/// How fully_shard() is called on a module, if it is.
using ShardPlan = std::optional<ReshardAfterForward>;

struct BlockPlan {
  BlockKind kind = BlockKind::kNoParameters;
  std::vector<int64_t> widths;  ///< from inputs to outputs, with what lies between linears
  int64_t depth = 1;            ///< first size of the 3-D parameter
  bool bias = true;
  std::optional<at::ScalarType> frozen_dtype;  ///< of a frozen factor of the outputs, if there
  Freeze freeze = Freeze::kNone;
  Use use = Use::kAlways;
  bool called_twice = false;
  ShardPlan shard;
  ShardPlan inner_shard;  ///< of the first linear, or the norm
};

/// Consecutive blocks under one module.
struct StagePlan {
  size_t num_blocks = 0;
  bool called_twice = false;
  ShardPlan shard;
};

/// Two blocks whose first linears share their weight.
struct TiePlan {
  size_t block = 0;
  size_t other_block = 0;
};

struct ModelPlan {
  uint64_t seed = 0;
  Precision precision = Precision::kFloat;
  // The model: (embedding) stages head.
  std::optional<int64_t> vocab_size;  ///< set: an embedding in front
  ShardPlan embedding_shard;
  bool embedding_frozen = false;
  std::vector<BlockPlan> blocks;
  std::vector<StagePlan> stages;
  std::vector<TiePlan> ties;
  int64_t head_width = 1;
  bool head_bias = true;
  bool head_tied = false;  ///< to the embedding
  ShardPlan head_shard;
  // The ranks.
  int world_size = 1;
  std::optional<int64_t> num_replicas;  ///< set: a 2-D mesh
  ReshardAfterForward root_reshard;
  bool reshard_after_backward = true;
  // The training.
  int num_steps = 3;
  int64_t rows_per_rank = 1;  ///< of a microbatch
  Accumulation accumulation = Accumulation::kNone;
  OptimizerKind optimizer = OptimizerKind::kSgdMomentum;
  bool zero_grad_to_none = true;

  [[nodiscard]] int64_t num_microbatches() const {
    return accumulation == Accumulation::kNone ? 1 : 2;
  }
  [[nodiscard]] int64_t input_width() const { return blocks.front().widths.front(); }
  [[nodiscard]] at::ScalarType dtype() const {
    return precision == Precision::kDouble ? at::kDouble : at::kFloat;
  }
};

/// The plan that belongs to `seed`, the same on every platform.
ModelPlan draw_plan(uint64_t seed);

/// One line that tells the plan.
std::string describe(const ModelPlan& plan);

}  // namespace fsdp::testing
