#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "fsdp/adamw.h"
#include "fsdp/process_group.h"
#include "models/llama.h"
#include "train/config.h"
#include "train/data.h"
#include "train/export.h"
#include "train/lr_schedule.h"
#include "train/metrics.h"

namespace fsdp::train {

/// One rank's part of a run. Every method is collective.
class Trainer {
 public:
  /// Builds the model, the same on each rank, and shards it over the ranks of `group`.
  /// `config` and `data` must outlive the trainer.
  Trainer(const TrainConfig& config, const TokenFile& data, ProcessGroupPtr group);

  /// Trains, validates, and leaves the results in the output folder; rank 0 tells of it.
  /// Errors:  StateError if the loss is no longer a number.
  void run();

  /// One optimizer step over the global batch of `step`, counted from 0.
  StepMetrics step(int64_t step);
  /// The mean loss over sequences spread evenly over the validation split: the same at each call.
  double validate();
  /// The whole weights, by the names of Hugging Face.
  [[nodiscard]] NamedTensors weights() const { return full_weights(*llama_); }
  /// The prompt, and what the model says after it.
  std::vector<uint16_t> sample();

 private:
  [[nodiscard]] c10::Device device() const { return params_[0].device(); }
  at::Tensor loss_of(const Batch& batch);
  double mean_over_ranks(const at::Tensor& value);
  void report(double val_loss);

  const TrainConfig& config_;
  const TokenFile& data_;
  ProcessGroupPtr group_;
  Split split_;
  LrSchedule schedule_;
  models::LlamaForCausalLM llama_;
  std::vector<at::Tensor> params_;
  AdamW optimizer_;
};

/// Runs what `config` asks for, on ranks as threads or as one of a launcher's processes.
/// Errors:  whatever a rank throws; the other ranks end too.
void train(const TrainConfig& config);

}  // namespace fsdp::train
