#include "train/lr_schedule.h"

#include <gtest/gtest.h>

namespace fsdp::train {
namespace {

// Promise: a line up to lr, half a cosine down to min_lr, both ends reached exactly.
TEST(LrScheduleTest, RisesToLrAndFallsToMinLr) {
  const LrSchedule schedule{.lr = 1.0, .min_lr = 0.2, .warmup_steps = 4, .steps = 13};
  EXPECT_DOUBLE_EQ(schedule.at(0), 0.25);
  EXPECT_DOUBLE_EQ(schedule.at(1), 0.5);
  EXPECT_DOUBLE_EQ(schedule.at(3), 1.0);
  EXPECT_DOUBLE_EQ(schedule.at(4), 1.0);   // cos 0
  EXPECT_DOUBLE_EQ(schedule.at(8), 0.6);   // half way: the mean
  EXPECT_DOUBLE_EQ(schedule.at(12), 0.2);  // cos pi
  EXPECT_DOUBLE_EQ(schedule.at(99), 0.2);  // not up again
  // A third of the way down: cos(pi / 3) is a half.
  const LrSchedule thirds{.lr = 1.0, .min_lr = 0.0, .warmup_steps = 0, .steps = 4};
  EXPECT_NEAR(thirds.at(1), 0.75, 1e-15);
}

// Promise: the shortest runs have a learning rate too.
TEST(LrScheduleTest, ShortRuns) {
  EXPECT_DOUBLE_EQ((LrSchedule{.lr = 1, .min_lr = 0, .warmup_steps = 0, .steps = 1}).at(0), 1.0);
  EXPECT_DOUBLE_EQ((LrSchedule{.lr = 1, .min_lr = 0, .warmup_steps = 1, .steps = 1}).at(0), 1.0);
  const LrSchedule all_warmup{.lr = 1, .min_lr = 0, .warmup_steps = 2, .steps = 2};
  EXPECT_DOUBLE_EQ(all_warmup.at(0), 0.5);
  EXPECT_DOUBLE_EQ(all_warmup.at(1), 1.0);
}

}  // namespace
}  // namespace fsdp::train
