// fsdp-train's trainer on simulated npus: the numbers of the CPU, and no race.

#include "train/trainer.h"

#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "sim/npu_ranks.h"
#include "train/temporary_directory.h"

namespace fsdp::train {
namespace {

using testing::Devices;

// A multiple of 16 elements for each rank: the optimizer's kernel rounds the rest otherwise, and
// what is the rest depends on the device.
TrainConfig tiny_config(const testing::TemporaryDirectory& directory, int ranks, bool bf16) {
  TrainConfig config = parse_command_line({}, std::nullopt).config;
  config.model.hidden_size = 64;
  config.model.intermediate_size = 64;
  config.model.num_hidden_layers = 2;
  config.model.num_attention_heads = 2;
  config.model.num_key_value_heads = 1;
  config.model.max_position_embeddings = 8;
  config.ranks = ranks;
  config.bf16 = bf16;
  config.data = (directory / "text.txt").string();
  config.steps = 3;
  config.batch_size = 8;
  config.accumulate_steps = 2;
  config.warmup_steps = 1;
  config.val_batches = 2;
  config.sample_tokens = 5;
  return config;
}

struct Trained {
  std::vector<double> values;
  std::vector<uint16_t> sample;
  NamedTensors weights;
};

Trained train_steps(TrainConfig config, bool on_npus) {
  config.npu = on_npus;
  const TokenFile data = open_tokens(config.data);
  Trained trained;
  const auto devices = on_npus ? std::make_optional(Devices::kOneEach) : std::nullopt;
  testing::run_ranks_on(devices, config.ranks, [&](const auto& group, const auto&) {
    Trainer trainer(config, data, group);
    Trained mine;
    for (int64_t step = 0; step < config.steps; ++step) {
      const StepMetrics metrics = trainer.step(step);
      mine.values.insert(mine.values.end(), {metrics.loss, metrics.grad_norm});
    }
    mine.values.push_back(trainer.validate());
    mine.sample = trainer.sample();
    mine.weights = trainer.weights();
    if (group->getRank() == 0) trained = std::move(mine);
  });
  return trained;
}

class NpuTrainer : public ::testing::TestWithParam<std::tuple<int, bool>>, testing::CleanSim {};

TEST_P(NpuTrainer, HasTheNumbersOfTheCpu) {
  const testing::TemporaryDirectory directory;
  testing::write_sample_text(directory / "text.txt", /*num_lines=*/100);
  const TrainConfig config =
      tiny_config(directory, std::get<0>(GetParam()), std::get<1>(GetParam()));
  const Trained expected = train_steps(config, /*on_npus=*/false);
  testing::in_every_execution([&] {
    const Trained found = train_steps(config, /*on_npus=*/true);
    EXPECT_EQ(found.values, expected.values);
    EXPECT_EQ(found.sample, expected.sample);
    ASSERT_EQ(found.weights.size(), expected.weights.size());
    for (size_t i = 0; i < expected.weights.size(); ++i) {
      EXPECT_TRUE(at::equal(found.weights[i].second.cpu(), expected.weights[i].second))
          << expected.weights[i].first;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Npu, NpuTrainer,
                         ::testing::Combine(::testing::Values(1, 2, 4), ::testing::Bool()),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) ? "_Bf16" : "_Fp32");
                         });

}  // namespace
}  // namespace fsdp::train
