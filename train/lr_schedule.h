#pragma once

#include <cstdint>

namespace fsdp::train {

/// A learning rate that rises along a line and falls along half a cosine.
struct LrSchedule {
  double lr = 0;             ///< at the end of the warm-up
  double min_lr = 0;         ///< of the last step
  int64_t warmup_steps = 0;  ///< the first of them has lr / warmup_steps, the last has lr
  int64_t steps = 1;

  /// The learning rate of a step, counted from 0.
  [[nodiscard]] double at(int64_t step) const;
};

}  // namespace fsdp::train
