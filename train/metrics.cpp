#include "train/metrics.h"

#include <algorithm>
#include <cstdio>

#include <unistd.h>

#include <nlohmann/json.hpp>
#ifndef FMT_HEADER_ONLY
#define FMT_HEADER_ONLY
#endif
#include <fmt/format.h>

#include "fsdp/error.h"

namespace fsdp::train {

std::string format_seconds(double seconds) {
  const auto whole = static_cast<int64_t>(std::max(seconds, 0.0) + 0.5);
  if (whole < 60) return fmt::format("{}s", whole);
  if (whole < 3600) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}h{:02}m", whole / 3600, whole / 60 % 60);
}

std::string format_progress(const StepMetrics& metrics, int64_t num_steps) {
  const double seconds_per_step = metrics.elapsed_s / static_cast<double>(metrics.step);
  const double remaining_s = seconds_per_step * static_cast<double>(num_steps - metrics.step);
  std::string line = fmt::format(
      "step {:>{}}/{}  loss {:.4f}  grad norm {:.3f}  lr {:.2e}  {:.0f} tokens/s  {} left",
      metrics.step, fmt::formatted_size("{}", num_steps), num_steps, metrics.loss,
      metrics.grad_norm, metrics.lr, metrics.tokens_per_s, format_seconds(remaining_s));
  if (metrics.val_loss) line += fmt::format("  validation loss {:.4f}", *metrics.val_loss);
  return line;
}

MetricsLog::MetricsLog(const std::filesystem::path& jsonl, int64_t num_steps)
    : path_(jsonl.string()),
      jsonl_(jsonl),
      num_steps_(num_steps),
      terminal_(::isatty(STDOUT_FILENO) != 0) {
  FSDP_CHECK(CheckpointError, jsonl_.good(), "MetricsLog: cannot write '", path_, "'.");
}

void MetricsLog::record(const StepMetrics& metrics) {
  nlohmann::ordered_json json = {{"step", metrics.step},
                                 {"loss", metrics.loss},
                                 {"grad_norm", metrics.grad_norm},
                                 {"lr", metrics.lr},
                                 {"tokens_per_s", metrics.tokens_per_s},
                                 {"elapsed_s", metrics.elapsed_s}};
  if (metrics.val_loss) json["val_loss"] = *metrics.val_loss;
  jsonl_ << json.dump() << '\n' << std::flush;
  FSDP_CHECK(CheckpointError, jsonl_.good(), "MetricsLog: cannot write '", path_, "'.");

  const bool last = metrics.step == num_steps_;
  const int64_t every = std::max<int64_t>(num_steps_ / 40, 1);
  const std::string line = format_progress(metrics, num_steps_);
  if (terminal_) {
    const bool keep = last || metrics.val_loss.has_value();
    fmt::print("\r\033[K{}{}", line, keep ? "\n" : "");
  } else if (metrics.step == 1 || metrics.step % every == 0 || last || metrics.val_loss) {
    fmt::print("{}\n", line);
  }
  std::fflush(stdout);
}

}  // namespace fsdp::train
