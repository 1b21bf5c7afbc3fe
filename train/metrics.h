#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

namespace fsdp::train {

/// What one step did, over all ranks.
struct StepMetrics {
  int64_t step = 0;      ///< counted from 1
  double loss = 0;       ///< nats per token, mean
  double grad_norm = 0;  ///< before clipping
  double lr = 0;
  double tokens_per_s = 0;
  double elapsed_s = 0;            ///< since the first step began, validations included
  std::optional<double> val_loss;  ///< nats per token, where the step was followed by a validation
};

/// "1m05s"
[[nodiscard]] std::string format_seconds(double seconds);

/// The line of a step for a reader, with the time that the remaining steps will take.
[[nodiscard]] std::string format_progress(const StepMetrics& metrics, int64_t num_steps);

/// Tells of each step: a line on standard output, and a JSON object in a file.
///
/// On a terminal the line is written over; elsewhere about forty lines are printed in all.
/// Errors:  CheckpointError if the file cannot be written.
class MetricsLog {
 public:
  MetricsLog(const std::filesystem::path& jsonl, int64_t num_steps);
  void record(const StepMetrics& metrics);

 private:
  std::string path_;
  std::ofstream jsonl_;
  int64_t num_steps_;
  bool terminal_;
};

}  // namespace fsdp::train
