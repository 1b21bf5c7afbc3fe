#include "train/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "fsdp/error.h"
#include "temporary_directory.h"
#include "train/export.h"
#include "train/tokenizer.h"

namespace fsdp::train {
namespace {

TrainConfig tiny_config(const testing::TemporaryDirectory& directory, int ranks) {
  TrainConfig config = parse_command_line({}, std::nullopt).config;
  config.model.hidden_size = 16;
  config.model.intermediate_size = 24;
  config.model.num_hidden_layers = 2;
  config.model.num_attention_heads = 2;
  config.model.num_key_value_heads = 1;
  config.model.max_position_embeddings = 8;
  config.ranks = ranks;
  config.data = (directory / "text.txt").string();
  config.out_dir = (directory / "out").string();
  config.steps = 6;
  config.batch_size = 12;
  config.warmup_steps = 2;
  config.val_every = 3;
  config.val_batches = 2;
  config.sample_tokens = 10;
  return config;
}

struct Trained {
  std::vector<double> losses;
  std::vector<double> grad_norms;
  double val_loss = 0;
  std::vector<uint16_t> sample;
  NamedTensors weights;
};

Trained train_steps(const TrainConfig& config) {
  const TokenFile data = open_tokens(config.data);
  Trained trained;
  run_ranks(config.ranks, [&](const ProcessGroupPtr& group) {
    Trainer trainer(config, data, group);
    Trained mine;
    for (int64_t step = 0; step < config.steps; ++step) {
      const StepMetrics metrics = trainer.step(step);
      mine.losses.push_back(metrics.loss);
      mine.grad_norms.push_back(metrics.grad_norm);
    }
    mine.val_loss = trainer.validate();
    mine.sample = trainer.sample();
    mine.weights = trainer.weights();
    if (group->getRank() == 0) trained = mine;
  });
  return trained;
}

void expect_near(const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], tolerance) << "step " << i;
}

// Promise: ranks and micro-batches change how a step is done, not what it computes.
TEST(TrainerTest, RanksAndMicroBatchesDoNotChangeTheResult) {
  const testing::TemporaryDirectory directory;
  testing::write_sample_text(directory / "text.txt", /*num_lines=*/100);
  const Trained one = train_steps(tiny_config(directory, 1));
  EXPECT_LT(one.losses.back(), one.losses.front() - 0.1) << "it does not learn";
  struct Division {
    int ranks;
    int64_t accumulate_steps;
  };
  for (const auto& [ranks, accumulate_steps] :
       {Division{1, 3}, Division{2, 1}, Division{2, 3}, Division{3, 2}, Division{12, 1}}) {
    SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << accumulate_steps << " backwards");
    TrainConfig config = tiny_config(directory, ranks);
    config.accumulate_steps = accumulate_steps;
    const Trained many = train_steps(config);
    // Sums of floats in another order: 2^-24 of values near 5, grown by six steps of AdamW, which
    // turns the rounding of a small gradient into a step of lr x rounding / gradient.
    expect_near(many.losses, one.losses, 1e-3);
    expect_near(many.grad_norms, one.grad_norms, 1e-2);
    EXPECT_NEAR(many.val_loss, one.val_loss, 1e-3);
    EXPECT_EQ(many.losses.size(), 6u);
    ASSERT_EQ(many.weights.size(), one.weights.size());
    for (size_t i = 0; i < one.weights.size(); ++i) {
      EXPECT_EQ(many.weights[i].first, one.weights[i].first);
      EXPECT_EQ(many.weights[i].second.sizes(), one.weights[i].second.sizes());
    }
  }
}

// Promise: the same seed gives the same numbers, bit for bit, whatever the threads' timing.
TEST(TrainerTest, ARunIsReproducible) {
  const testing::TemporaryDirectory directory;
  testing::write_sample_text(directory / "text.txt", /*num_lines=*/100);
  const Trained first = train_steps(tiny_config(directory, 2));
  const Trained again = train_steps(tiny_config(directory, 2));
  EXPECT_EQ(first.losses, again.losses);
  EXPECT_EQ(first.grad_norms, again.grad_norms);
  EXPECT_EQ(first.val_loss, again.val_loss);
  EXPECT_EQ(first.sample, again.sample);
  for (size_t i = 0; i < first.weights.size(); ++i) {
    EXPECT_TRUE(at::equal(first.weights[i].second, again.weights[i].second))
        << first.weights[i].first;
  }
}

// Promise: weight decay shrinks matrices alone, judged by the whole shape and not by the shard's.
TEST(TrainerTest, DecaysMatricesAlone) {
  const testing::TemporaryDirectory directory;
  testing::write_sample_text(directory / "text.txt", /*num_lines=*/100);
  TrainConfig config = tiny_config(directory, 2);
  config.steps = config.warmup_steps = 1;
  config.weight_decay = 0;
  const Trained plain = train_steps(config);
  config.weight_decay = 10;
  const Trained decayed = train_steps(config);
  models::LlamaForCausalLM initial(config.model);
  initialize(initial, config.model, at::make_generator<at::CPUGeneratorImpl>(config.seed));
  for (size_t i = 0; i < plain.weights.size(); ++i) {
    const auto& [name, weight] = plain.weights[i];
    const double shrink = weight.dim() >= 2 ? config.lr * config.weight_decay : 0;
    const at::Tensor before = initial->named_parameters()[name].detach();
    // Decoupled: it takes its part of the weight before the step. The step itself is the same.
    EXPECT_TRUE(torch::allclose(decayed.weights[i].second, weight - before * shrink, 0, 1e-6))
        << name;
  }
}

// Promise: a run leaves metrics, a summary, its options and the weights behind.
TEST(TrainerTest, LeavesItsResults) {
  const testing::TemporaryDirectory directory;
  testing::write_sample_text(directory / "text.txt", /*num_lines=*/100);
  TrainConfig config = tiny_config(directory, 2);
  config.bf16 = true;
  train(config);
  const std::filesystem::path out = config.out_dir;
  const auto summary = nlohmann::json::parse(testing::read_file(out / "summary.json"));
  EXPECT_FALSE(summary["beaten"].get<bool>());  // six steps of a tiny model
  EXPECT_GT(summary["val_loss"].get<double>(), summary["bigram_entropy"].get<double>());
  const std::string metrics = testing::read_file(out / "metrics.jsonl");
  EXPECT_EQ(std::count(metrics.begin(), metrics.end(), '\n'), 6);
  const auto json = nlohmann::json::parse(testing::read_file(out / "config.json"));
  EXPECT_EQ(json["model_type"], "llama");
  EXPECT_EQ(json["num_key_value_heads"], 1);
  EXPECT_EQ(json["head_dim"], 8);
  EXPECT_FALSE(testing::read_file(out / "train.toml").empty());
  EXPECT_GT(std::filesystem::file_size(out / "model.safetensors"), 4u * 256 * 16 * 2);
}

// Promise: a rate that makes the loss overflow ends the run and says what to do.
TEST(TrainerTest, StopsWhenTheLossIsNoNumber) {
  const testing::TemporaryDirectory directory;
  testing::write_sample_text(directory / "text.txt", /*num_lines=*/100);
  TrainConfig config = tiny_config(directory, 2);
  config.lr = config.min_lr = 1e30;
  config.warmup_steps = 0;
  try {
    train(config);
    FAIL() << "finished";
  } catch (const StateError& error) {
    EXPECT_NE(message_of(error).find("Lower --lr"), std::string::npos) << message_of(error);
  }
}

}  // namespace
}  // namespace fsdp::train
