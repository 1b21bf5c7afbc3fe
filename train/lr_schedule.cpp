#include "train/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace fsdp::train {

double LrSchedule::at(int64_t step) const {
  if (step < warmup_steps) {
    return lr * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  }
  const auto fall_steps = static_cast<double>(std::max<int64_t>(steps - 1 - warmup_steps, 1));
  const double fallen = std::min(static_cast<double>(step - warmup_steps) / fall_steps, 1.0);
  return min_lr + (lr - min_lr) * (1 + std::cos(std::numbers::pi * fallen)) / 2;
}

}  // namespace fsdp::train
