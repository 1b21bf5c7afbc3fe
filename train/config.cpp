#include "train/config.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include <CLI/CLI.hpp>
#ifndef FMT_HEADER_ONLY
#define FMT_HEADER_ONLY
#endif
#include <fmt/format.h>

#include "fsdp/error.h"

namespace fsdp::train {
namespace {

/// Options as typed that need a second look before they are a TrainConfig.
struct RawOptions {
  std::optional<int> ranks;
  std::optional<int64_t> kv_heads;
  std::optional<int64_t> warmup_steps;
  std::optional<double> min_lr;
  std::string device = "cpu";
  std::string dtype = "fp32";
  std::string reshard_after_forward = "auto";
};

ReshardAfterForward parse_reshard_after_forward(const std::string& text) {
  if (text == "auto") return {};
  if (text == "true" || text == "false") return text == "true";
  const bool number = !text.empty() && text.size() < 10 &&
                      std::all_of(text.begin(), text.end(), [](char c) { return isdigit(c); });
  FSDP_CHECK(ConfigError, number, "--reshard-after-forward is '", text,
             "', but must be auto, true, false or a number of ranks.");
  return int64_t{std::stol(text)};
}

void add_rank_options(CLI::App& app, TrainConfig& config, RawOptions& raw) {
  const std::string group = "Ranks";
  app.add_option("--ranks", raw.ranks,
                 "Ranks, as threads of this process [2]; under torchrun, mpirun or srun the "
                 "launcher's processes are the ranks")
      ->group(group);
  app.add_option(
         "--device", raw.device,
         "cpu, or npu: Ascend NPUs, one for each of a launcher's processes (docs/ascend.md)")
      ->check(CLI::IsMember({"cpu", "npu"}))
      ->group(group);
  app.add_option("--dtype", raw.dtype,
                 "fp32, or bf16: parameters and activations in bf16, gradients reduced in fp32")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->group(group);
  app.add_option("--reshard-after-forward", raw.reshard_after_forward,
                 "Free parameters between forward and backward: auto (all but the root's), true, "
                 "false, or K: keep 1/K of them")
      ->group(group);
  app.add_option("--timeout", config.timeout_s, "Seconds that a rank waits for the others")
      ->group(group);
}

void add_model_options(CLI::App& app, TrainConfig& config, RawOptions& raw) {
  const std::string group = "Model";
  models::LlamaConfig& model = config.model;
  app.add_option("--hidden-size", model.hidden_size, "Features of a token")->group(group);
  app.add_option("--intermediate-size", model.intermediate_size, "Features inside of the MLP")
      ->group(group);
  app.add_option("--layers", model.num_hidden_layers, "Decoder layers")->group(group);
  app.add_option("--heads", model.num_attention_heads, "Attention heads")->group(group);
  app.add_option("--kv-heads", raw.kv_heads, "Key-value heads; they divide --heads [--heads]")
      ->group(group);
  app.add_option("--seq-len", model.max_position_embeddings, "Tokens of a sequence")->group(group);
  app.add_option("--rope-theta", model.rope_theta, "Base of the rotary wavelengths")->group(group);
  app.add_option("--rms-norm-eps", model.rms_norm_eps, "Added to the mean square")->group(group);
  app.add_option("--init-range", model.initializer_range,
                 "Standard deviation of the initial weights")
      ->group(group);
  app.add_flag("--tie-embeddings", model.tie_word_embeddings,
               "One matrix for the embedding and the output [off]")
      ->group(group);
}

void add_step_options(CLI::App& app, TrainConfig& config, RawOptions& raw) {
  const std::string group = "Training";
  app.add_option("--steps", config.steps, "Optimizer steps")->group(group);
  app.add_option("--batch-size", config.batch_size,
                 "Sequences of one step, over all ranks; a multiple of ranks x accumulate-steps")
      ->group(group);
  app.add_option("--accumulate-steps", config.accumulate_steps,
                 "Backwards of one step; more of them need less memory")
      ->group(group);
  app.add_option("--lr", config.lr, "Learning rate after warm-up")->group(group);
  app.add_option("--min-lr", raw.min_lr, "Learning rate of the last step [a tenth of --lr]")
      ->group(group);
  app.add_option("--warmup-steps", raw.warmup_steps,
                 "Steps in which the learning rate rises from 0 [a tenth of --steps]; after them "
                 "it falls along a cosine")
      ->group(group);
  app.add_option("--betas", config.betas, "AdamW's decay of the two moments, as B1,B2")
      ->delimiter(',')
      ->expected(1, 2)
      ->default_str(fmt::format("{},{}", config.betas[0], config.betas[1]))
      ->group(group);
  app.add_option("--weight-decay", config.weight_decay, "AdamW's, of matrices alone")->group(group);
  app.add_option("--grad-clip", config.grad_clip,
                 "Largest norm of all gradients together; 0: do not clip")
      ->group(group);
  app.add_option("--seed", config.seed, "Of the weights, the batches and the sample")->group(group);
}

void add_file_options(CLI::App& app, TrainConfig& config) {
  const std::string group = "Data and results";
  app.add_option("--data", config.data,
                 "Text to learn, or a token file (.bin) made of it; its last tenth validates")
      ->group(group);
  app.add_option("--out-dir", config.out_dir,
                 "Folder for metrics.jsonl, summary.json, train.toml, config.json and "
                 "model.safetensors")
      ->group(group);
  app.add_option("--val-every", config.val_every,
                 "Steps between validations; 0: only after the last step")
      ->group(group);
  app.add_option("--val-batches", config.val_batches,
                 "Batches of a validation, each of --batch-size sequences")
      ->group(group);
  app.add_option("--sample-tokens", config.sample_tokens, "Tokens to generate at the end")
      ->group(group);
  app.add_option("--temperature", config.temperature, "Of the sample; 0: the likeliest token")
      ->group(group);
  app.add_option("--prompt", config.prompt, "What the sample starts with")->group(group);
}

void check_at_least(const char* option, double value, double least) {
  FSDP_CHECK(ConfigError, value >= least, option, " is ", value, ", but must be at least ", least,
             ".");
}

int ranks_of(const RawOptions& raw, const std::optional<Launcher>& launcher, int fallback) {
  if (!launcher) return raw.ranks.value_or(fallback);
  FSDP_CHECK(ConfigError, raw.ranks.value_or(launcher->world_size) == launcher->world_size,
             "--ranks ", raw.ranks.value_or(0), " contradicts ", launcher->name, ", which started ",
             launcher->world_size, " processes. Leave --ranks out under a launcher.");
  return launcher->world_size;
}

std::string value_of(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

}  // namespace

std::optional<Launcher> find_launcher() {
  struct Variables {
    const char *name, *rank, *world_size;
  };
  // A rank beside the size: a Slurm allocation without srun, or a shell that exports WORLD_SIZE for
  // another purpose, starts no ranks.
  for (const auto& [name, rank, world_size] :
       {Variables{"torchrun", "RANK", "WORLD_SIZE"},
        Variables{"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
        Variables{"mpirun", "PMI_RANK", "PMI_SIZE"},
        Variables{"srun", "SLURM_PROCID", "SLURM_NTASKS"}}) {
    const std::string size = value_of(world_size);
    if (value_of(rank).empty() || size.empty()) continue;
    const int number = std::atoi(size.c_str());
    FSDP_CHECK(ConfigError, number > 0, name, " gave ", world_size, "='", size,
               "', which is not a number of ranks.");
    return Launcher{.name = name, .world_size = number};
  }
  return std::nullopt;
}

void TrainConfig::check() const {
  model.check();
  check_at_least("--ranks", ranks, 1);
  check_at_least("--timeout", static_cast<double>(timeout_s), 1);
  FSDP_CHECK(ConfigError, launched || !npu,
             "--device npu needs a process for each rank. Start it with torchrun --nproc-per-node=",
             ranks, " --no-python fsdp-train --device npu ..., or with mpirun or srun.");
  check_at_least("--steps", static_cast<double>(steps), 1);
  check_at_least("--batch-size", static_cast<double>(batch_size), 1);
  check_at_least("--accumulate-steps", static_cast<double>(accumulate_steps), 1);
  check_at_least("--warmup-steps", static_cast<double>(warmup_steps), 0);
  check_at_least("--lr", lr, 0);
  check_at_least("--min-lr", min_lr, 0);
  check_at_least("--weight-decay", weight_decay, 0);
  check_at_least("--grad-clip", grad_clip, 0);
  check_at_least("--val-every", static_cast<double>(val_every), 0);
  check_at_least("--val-batches", static_cast<double>(val_batches), 1);
  check_at_least("--sample-tokens", static_cast<double>(sample_tokens), 0);
  check_at_least("--temperature", temperature, 0);
  for (const double beta : betas) {
    FSDP_CHECK(ConfigError, beta >= 0 && beta < 1, "--betas has ", beta,
               ", but both must be at least 0 and below 1.");
  }
  FSDP_CHECK(ConfigError, batch_size % (ranks * accumulate_steps) == 0, "--batch-size ", batch_size,
             " is not a multiple of ", ranks, " ranks x ", accumulate_steps,
             " --accumulate-steps = ", ranks * accumulate_steps,
             ": every rank takes as many sequences in each backward.");
  FSDP_CHECK(ConfigError, warmup_steps <= steps, "--warmup-steps ", warmup_steps,
             " is more than --steps ", steps, ": the learning rate would never be reached.");
  FSDP_CHECK(ConfigError, min_lr <= lr, "--min-lr ", min_lr, " is more than --lr ", lr, ".");
  FSDP_CHECK(ConfigError, sample_tokens == 0 || !prompt.empty(),
             "--prompt is empty, but --sample-tokens ", sample_tokens,
             " asks for a sample: give it at least one character to start with.");
  if (const auto* kept = std::get_if<int64_t>(&reshard_after_forward)) {
    FSDP_CHECK(ConfigError, *kept >= 2 && *kept < ranks && ranks % *kept == 0,
               "--reshard-after-forward ", *kept, " must divide the ", ranks,
               " ranks, and be neither 1 nor all of them (those are false and true).");
  }
}

CommandLine parse_command_line(std::vector<std::string> arguments,
                               const std::optional<Launcher>& launcher) {
  CommandLine line;
  TrainConfig& config = line.config;
  RawOptions raw;

  CLI::App app("Trains a Llama decoder on the bytes of a text, sharded over ranks.", "fsdp-train");
  app.option_defaults()->always_capture_default();
  app.set_version_flag("--version", "fsdp-train 0.1.0");
  app.set_config("--config", "", "File of options, as `name = value` lines; the line wins");
  app.allow_config_extras(CLI::config_extras_mode::error);
  add_rank_options(app, config, raw);
  add_model_options(app, config, raw);
  add_step_options(app, config, raw);
  add_file_options(app, config);

  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    line.text = app.help();
    return line;
  } catch (const CLI::CallForVersion& version) {
    line.text = std::string(version.what()) + "\n";
    return line;
  } catch (const CLI::ConfigError& error) {
    FSDP_CHECK(ConfigError, false, "in the file of --config: ", error.what(),
               ". Each line is `name = value`; fsdp-train --help lists the names.");
  } catch (const CLI::ParseError& error) {
    FSDP_CHECK(ConfigError, false, error.what(), ". fsdp-train --help lists the options.");
  }

  config.ranks = ranks_of(raw, launcher, config.ranks);
  config.launched = launcher.has_value();
  config.npu = raw.device == "npu";
  config.bf16 = raw.dtype == "bf16";
  config.reshard_after_forward = parse_reshard_after_forward(raw.reshard_after_forward);
  config.model.num_key_value_heads = raw.kv_heads.value_or(config.model.num_attention_heads);
  config.warmup_steps = raw.warmup_steps.value_or(config.steps / 10);
  config.min_lr = raw.min_lr.value_or(config.lr / 10);
  // What was derived becomes the default, so that the file says what is run.
  app.get_option("--kv-heads")->default_str(std::to_string(config.model.num_key_value_heads));
  app.get_option("--warmup-steps")->default_str(std::to_string(config.warmup_steps));
  app.get_option("--min-lr")->default_str(fmt::format("{}", config.min_lr));
  app.get_option("--ranks")->default_str(std::to_string(config.ranks));
  config.as_file = app.config_to_str(/*default_also=*/true);
  config.check();
  return line;
}

}  // namespace fsdp::train
