#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "fsdp/fully_shard.h"
#include "fsdp/process_group.h"
#include "support/models.h"

// Training the small decoder in one process and sharded, to compare every number of both.
namespace fsdp::testing {

enum class OptimizerKind { kSgdMomentum, kAdamW };

struct TrainingOptions {
  TransformerOptions model;
  OptimizerKind optimizer = OptimizerKind::kSgdMomentum;
  int num_steps = 10;
  int64_t batch_size = 24;  ///< of all ranks together
  int64_t seq_len = 7;
};

/// What one run gave.
struct TrainingLog {
  std::vector<double> losses;                        ///< mean over the global batch, per step
  std::vector<std::string> names;                    ///< of the parameters
  std::vector<std::vector<at::Tensor>> whole_grads;  ///< of the first and the last step
  std::vector<at::Tensor> whole_params;              ///< at the end
};

/// A model with the weights that belong to `seed`, the same on every call. Not sharded.
Transformer make_model(const TransformerOptions& options, uint64_t seed = 42);

/// Shards each block, then the model.
void shard_blocks_and_root(Transformer& model, const FullyShardOptions& options);

/// The tokens of one step, [batch_size, seq_len + 1], the same on every call.
at::Tensor batch_of_step(const TrainingOptions& options, int step);

/// The mean next-token loss of `tokens`.
at::Tensor loss_of(Transformer& model, const at::Tensor& tokens);

/// Shards and trains on this rank's part of each global batch; `shard` calls fully_shard. Without
/// `group` it trains in one process.
TrainingLog train(const TrainingOptions& options, const ProcessGroupPtr& group,
                  const std::function<void(Transformer&)>& shard);

/// The mean of one number over the ranks of `group`.
double mean_over_ranks(double value, const ProcessGroupPtr& group);

}  // namespace fsdp::testing
