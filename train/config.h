#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/policy.h"
#include "models/llama.h"

namespace fsdp::train {

/// How many ranks a launcher (torchrun, mpirun, srun) started, of which this process is one.
struct Launcher {
  std::string name;    ///< "torchrun", "mpirun" or "srun"
  int world_size = 1;  ///< number of processes
};

/// Looks for a launcher in the environment; the one place of the trainer that reads it.
[[nodiscard]] std::optional<Launcher> find_launcher();

/// What one run does. The defaults are those of `make train`.
struct TrainConfig {
  models::LlamaConfig model;

  int ranks = 2;          ///< number of ranks
  bool launched = false;  ///< a launcher started them as processes; else they are threads
  int64_t timeout_s = 300;
  bool npu = false;   ///< compute on Ascend NPUs, one for each rank; else on the CPU
  bool bf16 = false;  ///< compute in bf16, reduce in fp32
  ReshardAfterForward reshard_after_forward;

  std::string data = "data/shakespeare.txt";
  std::string out_dir = "outputs";

  int64_t steps = 400;
  int64_t batch_size = 8;  ///< sequences of one step, over all ranks and micro-batches
  int64_t accumulate_steps = 1;
  double lr = 4e-3;
  double min_lr = 4e-4;
  int64_t warmup_steps = 40;
  std::array<double, 2> betas = {0.9, 0.95};
  double weight_decay = 0.1;
  double grad_clip = 1.0;  ///< 0: none
  uint64_t seed = 1;

  int64_t val_every = 100;  ///< steps; 0: only after the last
  int64_t val_batches = 40;
  int64_t sample_tokens = 300;
  double temperature = 0.8;
  std::string prompt = "**ROMEO**";

  std::string as_file;  ///< every option with its value, readable by --config

  /// Sequences in one forward of one rank.
  [[nodiscard]] int64_t local_batch_size() const { return batch_size / (ranks * accumulate_steps); }
  [[nodiscard]] int64_t seq_len() const { return model.max_position_embeddings; }
  /// Errors:  ConfigError names the options that contradict each other.
  void check() const;
};

/// What the arguments ask for: a run, or a text to print instead.
struct CommandLine {
  TrainConfig config;
  std::string text;  ///< of --help or --version; empty: run
};

/// Reads the arguments that follow the program's name, and the file that --config names.
///
/// Errors:  ConfigError for an option that does not exist, a value that cannot be, or options that
///          contradict each other or the launcher.
[[nodiscard]] CommandLine parse_command_line(std::vector<std::string> arguments,
                                             const std::optional<Launcher>& launcher);

}  // namespace fsdp::train
