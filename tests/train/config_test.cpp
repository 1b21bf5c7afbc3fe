#include "train/config.h"

#include <sstream>

#include <gtest/gtest.h>

#include "fsdp/error.h"
#include "temporary_directory.h"

namespace fsdp::train {
namespace {

TrainConfig parse(const std::vector<std::string>& arguments,
                  const std::optional<Launcher>& launcher = std::nullopt) {
  return parse_command_line(arguments, launcher).config;
}

std::string refusal(const std::vector<std::string>& arguments,
                    const std::optional<Launcher>& launcher = std::nullopt) {
  try {
    parse(arguments, launcher);
  } catch (const ConfigError& error) {
    return message_of(error);
  }
  return "accepted";
}

struct Refused {
  std::vector<std::string> arguments;
  std::vector<std::string> message_has;
};

// Promise: what cannot be is refused, and the message names the option, what was found and why.
TEST(ConfigTest, RefusesWithTheOptionAndTheReason) {
  const std::vector<Refused> table = {
      {{"--no-such-option", "1"}, {"--no-such-option", "not expected"}},
      {{"stray"}, {"stray", "not expected"}},
      {{"--steps", "many"}, {"--steps", "many"}},
      {{"--steps", "0"}, {"--steps is 0", "at least 1"}},
      {{"--ranks", "0"}, {"--ranks is 0"}},
      {{"--lr", "-1"}, {"--lr is -1"}},
      {{"--grad-clip", "-1"}, {"--grad-clip is -1"}},
      {{"--timeout", "0"}, {"--timeout is 0"}},
      {{"--dtype", "fp8"}, {"--dtype", "fp8", "bf16"}},
      {{"--device", "gpu"}, {"--device", "gpu", "cpu"}},
      {{"--device", "npu", "--ranks", "3"}, {"--device npu", "a process for each rank", "=3"}},
      {{"--betas", "0.9"}, {"--betas"}},
      {{"--betas", "0.9,1.0"}, {"--betas has 1,", "below 1"}},
      {{"--ranks", "3", "--batch-size", "16"}, {"--batch-size 16", "3 ranks", "multiple"}},
      {{"--ranks", "2", "--batch-size", "6", "--accumulate-steps", "2"},
       {"--batch-size 6", "2 ranks x 2 --accumulate-steps = 4"}},
      {{"--steps", "10", "--warmup-steps", "11"}, {"--warmup-steps 11", "--steps 10"}},
      {{"--lr", "0.1", "--min-lr", "0.2"}, {"--min-lr 0.2", "--lr 0.1"}},
      {{"--prompt", ""}, {"--prompt is empty", "--sample-tokens"}},
      {{"--heads", "3"}, {"hidden_size 128", "num_attention_heads 3"}},
      {{"--heads", "128"}, {"128 heads", "a head of 1", "even"}},
      {{"--heads", "4", "--kv-heads", "3"}, {"num_attention_heads 4", "num_key_value_heads 3"}},
      {{"--layers", "0"}, {"num_hidden_layers must be positive", "0"}},
      {{"--reshard-after-forward", "perhaps"}, {"'perhaps'", "auto, true, false"}},
      {{"--reshard-after-forward", "-1"}, {"'-1'"}},
      {{"--ranks", "4", "--reshard-after-forward", "3"},
       {"--reshard-after-forward 3", "divide the 4 ranks"}},
      {{"--ranks", "2", "--reshard-after-forward", "2"}, {"nor all of them"}},
      {{"--config", "/no/such/file"}, {"/no/such/file"}},
  };
  for (const auto& [arguments, fragments] : table) {
    const std::string message = refusal(arguments);
    for (const std::string& fragment : fragments) {
      EXPECT_NE(message.find(fragment), std::string::npos) << fragment << "\nnot in: " << message;
    }
  }
}

// Promise: values that were not given follow from those that were.
TEST(ConfigTest, DerivesDefaults) {
  const TrainConfig config = parse({"--steps", "20", "--lr", "0.01", "--heads", "8"});
  EXPECT_EQ(config.ranks, 2);
  EXPECT_FALSE(config.launched);
  EXPECT_EQ(config.warmup_steps, 2);
  EXPECT_DOUBLE_EQ(config.min_lr, 0.001);
  EXPECT_EQ(config.model.num_key_value_heads, 8);
  EXPECT_EQ(config.reshard_after_forward.index(), 0u);
  EXPECT_EQ(std::get<bool>(parse({"--reshard-after-forward", "false"}).reshard_after_forward),
            false);
  const TrainConfig kept = parse({"--ranks", "4", "--reshard-after-forward", "2"});
  EXPECT_EQ(std::get<int64_t>(kept.reshard_after_forward), 2);
  EXPECT_EQ(parse({"--betas", "0.5,0.25"}).betas, (std::array<double, 2>{0.5, 0.25}));
  // make train ARGS="--steps 1"
  EXPECT_EQ(parse({"--steps", "1"}).warmup_steps, 0);
}

// Promise: under a launcher its processes are the ranks, and nothing may say otherwise.
TEST(ConfigTest, TakesTheRanksOfALauncher) {
  const Launcher four{.name = "torchrun", .world_size = 4};
  EXPECT_FALSE(parse({}, four).npu);
  EXPECT_TRUE(parse({"--device", "npu"}, four).npu);
  const TrainConfig config = parse({}, four);
  EXPECT_EQ(config.ranks, 4);
  EXPECT_TRUE(config.launched);
  EXPECT_EQ(parse({"--ranks", "4"}, four).ranks, 4);
  const std::string message = refusal({"--ranks", "2"}, four);
  EXPECT_NE(message.find("--ranks 2 contradicts torchrun, which started 4"), std::string::npos)
      << message;
}

// Promise: train.toml, which a run leaves behind, gives the same run again; the command line wins.
TEST(ConfigTest, ItsFileGivesTheSameConfig) {
  const testing::TemporaryDirectory directory;
  const TrainConfig first = parse({"--steps", "30", "--betas", "0.5,0.75", "--kv-heads", "2",
                                   "--tie-embeddings", "--prompt", "To be", "--dtype", "bf16"});
  testing::write_file(directory / "train.toml", first.as_file);
  const std::string file = (directory / "train.toml").string();
  const TrainConfig again = parse({"--config", file});
  EXPECT_EQ(again.as_file, first.as_file);
  EXPECT_EQ(again.betas, first.betas);
  EXPECT_EQ(again.prompt, "To be");
  EXPECT_TRUE(again.bf16);
  EXPECT_TRUE(again.model.tie_word_embeddings);
  EXPECT_EQ(again.model.num_key_value_heads, 2);
  EXPECT_EQ(parse({"--config", file, "--steps", "40"}).steps, 40);

  // All defaults, too; from then on the file stays as it is.
  testing::write_file(directory / "defaults.toml", parse({}).as_file);
  const TrainConfig defaults = parse({"--config", (directory / "defaults.toml").string()});
  EXPECT_EQ(defaults.betas, parse({}).betas);
  EXPECT_EQ(defaults.model.num_key_value_heads, parse({}).model.num_key_value_heads);
  EXPECT_DOUBLE_EQ(defaults.min_lr, parse({}).min_lr);
  testing::write_file(directory / "again.toml", defaults.as_file);
  EXPECT_EQ(parse({"--config", (directory / "again.toml").string()}).as_file, defaults.as_file);

  testing::write_file(directory / "wrong.toml", "steps = 5\nstpes = 6\n");
  const std::string message = refusal({"--config", (directory / "wrong.toml").string()});
  EXPECT_NE(message.find("stpes"), std::string::npos) << message;
}

// Promise: --help names every option that there is, with a default.
TEST(ConfigTest, HelpIsComplete) {
  const std::string help = parse_command_line({"--help"}, std::nullopt).text;
  std::istringstream file(parse({}).as_file);
  int num_options = 0;
  for (std::string line; std::getline(file, line); ++num_options) {
    const std::string option = "--" + line.substr(0, line.find('=')) + " ";
    const size_t at = help.find("  " + option);
    ASSERT_NE(at, std::string::npos) << option;
    const size_t next = help.find("\n  --", at);
    const std::string entry = help.substr(at, next - at);
    EXPECT_TRUE(entry.find('=') != std::string::npos || entry.find('[') != std::string::npos)
        << "no default: " << entry;
  }
  EXPECT_GE(num_options, 30);
}

class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) {
    if (value == nullptr) {
      ::unsetenv(name);
    } else {
      ::setenv(name, value, 1);
    }
  }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;
  ~ScopedVariable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

// Promise: a launcher is one that gives this process a rank; a size alone starts nothing.
TEST(ConfigTest, FindsALauncher) {
  EXPECT_FALSE(find_launcher().has_value());
  {
    const ScopedVariable tasks("SLURM_NTASKS", "8");
    EXPECT_FALSE(find_launcher().has_value());
    const ScopedVariable rank("SLURM_PROCID", "3");
    EXPECT_EQ(find_launcher()->name, "srun");
    EXPECT_EQ(find_launcher()->world_size, 8);
    const ScopedVariable torchrun_rank("RANK", "0"), torchrun_size("WORLD_SIZE", "2");
    EXPECT_EQ(find_launcher()->name, "torchrun");
    EXPECT_EQ(find_launcher()->world_size, 2);
  }
  const ScopedVariable rank("OMPI_COMM_WORLD_RANK", "0"), size("OMPI_COMM_WORLD_SIZE", "two");
  try {
    static_cast<void>(find_launcher());
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_NE(message_of(error).find("OMPI_COMM_WORLD_SIZE='two'"), std::string::npos);
  }
}

}  // namespace
}  // namespace fsdp::train
