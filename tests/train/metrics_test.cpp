#include "train/metrics.h"

#include <sstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "fsdp/error.h"
#include "temporary_directory.h"

namespace fsdp::train {
namespace {

StepMetrics metrics_of(int64_t step) {
  return {.step = step,
          .loss = 2.5,
          .grad_norm = 0.75,
          .lr = 0.001,
          .tokens_per_s = 1234.4,
          .elapsed_s = 30,
          .val_loss = {}};
}

// Promise: a step's line names loss, norm, rate, speed and the time that is left.
TEST(MetricsTest, ProgressLine) {
  EXPECT_EQ(format_progress(metrics_of(10), 400),
            "step  10/400  loss 2.5000  grad norm 0.750  lr 1.00e-03  1234 tokens/s  19m30s left");
  StepMetrics last = metrics_of(400);
  last.val_loss = 2.25;
  EXPECT_EQ(format_progress(last, 400),
            "step 400/400  loss 2.5000  grad norm 0.750  lr 1.00e-03  1234 tokens/s  0s left  "
            "validation loss 2.2500");
}

TEST(MetricsTest, Seconds) {
  EXPECT_EQ(format_seconds(0.4), "0s");
  EXPECT_EQ(format_seconds(59.4), "59s");
  EXPECT_EQ(format_seconds(59.6), "1m00s");
  EXPECT_EQ(format_seconds(3599), "59m59s");
  EXPECT_EQ(format_seconds(7260), "2h01m");
}

// Promise: each step is one JSON object in the file, there as soon as it is recorded.
TEST(MetricsTest, JsonLines) {
  const testing::TemporaryDirectory directory;
  MetricsLog log(directory / "metrics.jsonl", 2);
  log.record(metrics_of(1));
  StepMetrics second = metrics_of(2);
  second.val_loss = 2.25;
  log.record(second);

  std::istringstream lines(testing::read_file(directory / "metrics.jsonl"));
  std::vector<nlohmann::json> records;
  for (std::string line; std::getline(lines, line);) {
    records.push_back(nlohmann::json::parse(line));
  }
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0]["step"], 1);
  EXPECT_EQ(records[0]["loss"], 2.5);
  EXPECT_EQ(records[0]["grad_norm"], 0.75);
  EXPECT_EQ(records[0]["lr"], 0.001);
  EXPECT_FALSE(records[0].contains("val_loss"));
  EXPECT_EQ(records[1]["val_loss"], 2.25);
  EXPECT_THROW(MetricsLog(directory / "none" / "metrics.jsonl", 1), CheckpointError);
}

}  // namespace
}  // namespace fsdp::train
