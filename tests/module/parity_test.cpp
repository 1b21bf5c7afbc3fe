#include <ATen/ops/allclose.h>
#include <gtest/gtest.h>

#include "fsdp/fully_shard.h"
#include "support/layouts.h"
#include "support/training.h"

// Sharded training against the same training in one process.

namespace fsdp {
namespace {

using testing::OptimizerKind;
using testing::shard_blocks_and_root;
using testing::TrainingLog;
using testing::TrainingOptions;
using testing::Transformer;

constexpr double kTolerance = 1e-5;

// Sizes that no world size divides; 3 rows in a parameter, 1 in another: fewer than ranks.
TrainingOptions uneven_options(int64_t num_layers, OptimizerKind optimizer) {
  return {.model = {.num_layers = num_layers,
                    .vocab_size = 13,
                    .max_seq_len = 7,
                    .dim = 15,
                    .num_heads = 3,
                    .ffn_dim = 17,
                    .weight_tying = num_layers == 2},
          .optimizer = optimizer};
}

// The largest |a - b| / (1 + |b|) of all elements, and which tensor has it.
struct Difference {
  double value = 0;
  std::string name;
};

Difference largest_difference(const std::vector<at::Tensor>& ours,
                              const std::vector<at::Tensor>& reference,
                              const std::vector<std::string>& names) {
  Difference result;
  for (size_t i = 0; i < reference.size(); ++i) {
    EXPECT_EQ(ours[i].sizes(), reference[i].sizes()) << names[i];
    const double value =
        ((ours[i] - reference[i]).abs() / (1 + reference[i].abs())).max().item<double>();
    if (!(value <= result.value)) result = {value, names[i]};  // also for nan
  }
  return result;
}

void expect_parity(const TrainingLog& ours, const TrainingLog& reference) {
  ASSERT_EQ(ours.names, reference.names);
  for (size_t step = 0; step < reference.losses.size(); ++step) {
    EXPECT_NEAR(ours.losses[step], reference.losses[step], kTolerance * reference.losses[step])
        << "step " << step;
  }
  for (size_t i = 0; i < reference.whole_grads.size(); ++i) {
    const Difference difference =
        largest_difference(ours.whole_grads[i], reference.whole_grads[i], reference.names);
    EXPECT_LE(difference.value, kTolerance)
        << "gradient of " << difference.name << (i == 0 ? " in the first step" : " in the last");
  }
}

// World, layers, optimizer, reshard, layout.
using ParityCase = std::tuple<int, int64_t, OptimizerKind, int, Layout>;

const ReshardAfterForward kReshards[] = {{}, true, false};

class ParityTest : public ::testing::TestWithParam<ParityCase> {};

// Promise: sharding changes no number beyond the rounding of the reduction order: losses and every
// element of every gradient of the first and the tenth step; with one rank, not one bit.
TEST_P(ParityTest, EqualsOneProcess) {
  const auto& [world_size, num_layers, optimizer, reshard, layout] = GetParam();
  const TrainingOptions options = uneven_options(num_layers, optimizer);
  const TrainingLog reference = testing::train(options, nullptr, [](Transformer&) {});
  ASSERT_LE(reference.losses.back(), 0.8 * reference.losses.front()) << "nothing was learned";

  run_ranks(world_size, [&, reshard = reshard, world_size = world_size,
                         layout = layout](const ProcessGroupPtr& group) {
    const TrainingLog log = testing::train(options, group, [&](Transformer& model) {
      shard_blocks_and_root(model, {.reshard_after_forward = kReshards[reshard], .layout = layout});
    });
    expect_parity(log, reference);
    if (world_size > 1) return;
    EXPECT_EQ(log.losses, reference.losses);
    for (size_t i = 0; i < reference.whole_params.size(); ++i) {
      EXPECT_TRUE(log.whole_params[i].equal(reference.whole_params[i])) << reference.names[i];
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, ParityTest,
    ::testing::Combine(::testing::Values(1, 2, 3, 4, 8), ::testing::Values(2, 4),
                       ::testing::Values(OptimizerKind::kSgdMomentum, OptimizerKind::kAdamW),
                       ::testing::Values(0, 1, 2), testing::layouts()));

class Parity : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(Parity);

using LayoutParityCase = std::tuple<int, int64_t, OptimizerKind>;  // world, layers, optimizer

class LayoutParityTest : public ::testing::TestWithParam<LayoutParityCase> {};

// Promise: the layout changes not one bit of losses, gradients and parameters: it moves elements to
// other ranks and buffers, and each is still added up over ranks in the same order.
TEST_P(LayoutParityTest, FlatEqualsPerParameter) {
  const auto& [world_size, num_layers, optimizer] = GetParam();
  const TrainingOptions options = uneven_options(num_layers, optimizer);
  run_ranks(world_size, [&](const ProcessGroupPtr& group) {
    const auto train = [&](Layout layout) {
      return testing::train(options, group, [&](Transformer& model) {
        shard_blocks_and_root(model, {.layout = layout});
      });
    };
    const TrainingLog flat = train(Layout::kFlat);
    const TrainingLog per_parameter = train(Layout::kPerParameter);
    ASSERT_EQ(flat.names, per_parameter.names);
    EXPECT_EQ(flat.losses, per_parameter.losses);
    for (size_t i = 0; i < flat.names.size(); ++i) {
      for (size_t step = 0; step < flat.whole_grads.size(); ++step) {
        EXPECT_TRUE(flat.whole_grads[step][i].equal(per_parameter.whole_grads[step][i]))
            << "gradient of " << flat.names[i]
            << (step == 0 ? " in the first step" : " in the last");
      }
      EXPECT_TRUE(flat.whole_params[i].equal(per_parameter.whole_params[i])) << flat.names[i];
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, LayoutParityTest,
    ::testing::Combine(::testing::Values(1, 2, 3, 4, 8), ::testing::Values(2, 4),
                       ::testing::Values(OptimizerKind::kSgdMomentum, OptimizerKind::kAdamW)));

// Promise: the check above sees a wrong divisor. (Dividing by N + 1 instead of N is 1 part in 3.)
TEST_P(Parity, SeesAWrongDivisor) {
  TrainingOptions options = uneven_options(2, OptimizerKind::kSgdMomentum);
  options.num_steps = 1;
  const TrainingLog reference = testing::train(options, nullptr, [](Transformer&) {});
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    const TrainingLog log = testing::train(options, group, [&](Transformer& model) {
      shard_blocks_and_root(model, {.layout = GetParam()});
      for (auto& block : model->blocks) block->set_gradient_divide_factor(3);
    });
    EXPECT_GT(
        largest_difference(log.whole_grads[0], reference.whole_grads[0], reference.names).value,
        100 * kTolerance);
  });
}

// Promise: an integer reshard_after_forward gathers over fewer ranks in backward, same numbers.
TEST_P(Parity, ReshardAfterForwardToFewerRanks) {
  const TrainingOptions options = uneven_options(2, OptimizerKind::kAdamW);
  const TrainingLog reference = testing::train(options, nullptr, [](Transformer&) {});
  for (const int64_t k : {1, 2, 4, 8}) {
    run_ranks(8, [&](const ProcessGroupPtr& group) {
      expect_parity(testing::train(options, group,
                                   [&](Transformer& model) {
                                     shard_blocks_and_root(
                                         model, {.reshard_after_forward = k, .layout = GetParam()});
                                   }),
                    reference);
    });
  }
}

// Promise: HSDP on every split of 8 ranks gives the same numbers.
TEST_P(Parity, HybridShard) {
  const TrainingOptions options = uneven_options(2, OptimizerKind::kAdamW);
  const TrainingLog reference = testing::train(options, nullptr, [](Transformer&) {});
  for (const int64_t replicas : {1, 2, 4, 8}) {
    run_ranks(8, [&](const ProcessGroupPtr& group) {
      const DeviceMeshPtr mesh =
          init_device_mesh(c10::DeviceType::CPU, {replicas, 8 / replicas}, {"replicate", "shard"});
      expect_parity(testing::train(options, group,
                                   [&](Transformer& model) {
                                     shard_blocks_and_root(model,
                                                           {.mesh = mesh, .layout = GetParam()});
                                   }),
                    reference);
    });
  }
}

// Promise: cutting along another dimension changes no number. (dim 15 over 3 and 5 ranks.)
TEST_P(Parity, ShardPlacement) {
  TrainingOptions options = uneven_options(2, OptimizerKind::kAdamW);
  options.batch_size = 30;
  const TrainingLog reference = testing::train(options, nullptr, [](Transformer&) {});
  for (const int world_size : {1, 3, 5}) {
    run_ranks(world_size, [&](const ProcessGroupPtr& group) {
      const auto last_dim_if_even = [&](const std::string&, const at::Tensor& param) {
        const bool even = param.dim() > 1 && param.size(-1) % world_size == 0;
        return std::optional<Shard>(Shard{.dim = even ? -1 : 0});
      };
      for (const bool reshard : {true, false}) {
        expect_parity(testing::train(options, group,
                                     [&](Transformer& model) {
                                       shard_blocks_and_root(
                                           model, {.reshard_after_forward = reshard,
                                                   .shard_placement_fn = last_dim_if_even,
                                                   .layout = GetParam()});
                                     }),
                      reference);
      }
    });
  }
}

}  // namespace
}  // namespace fsdp
