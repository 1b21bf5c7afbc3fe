// The program as a shell sees it: exit codes and where its words go.
#include <array>
#include <cstdio>
#include <filesystem>
#include <string>

#include <sys/wait.h>

#include <gtest/gtest.h>

#include "temporary_directory.h"

namespace fsdp::train {
namespace {

/// fsdp-train as the build lays it out beside this test: build/tests/train_test, build/train/.
std::filesystem::path program() {
  const auto self = std::filesystem::read_symlink("/proc/self/exe");
  return self.parent_path().parent_path() / "train" / "fsdp-train";
}

struct Ran {
  int exit_code = -1;
  std::string out;  // standard output and standard error
};

Ran run(const std::string& arguments) {
  Ran ran;
  const std::string command = program().string() + " " + arguments + " 2>&1";
  FILE* const pipe = ::popen(command.c_str(), "r");
  std::array<char, 4096> buffer;
  while (const size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    ran.out.append(buffer.data(), count);
  }
  const int status = ::pclose(pipe);
  ran.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return ran;
}

// Promise: 0 done, 2 refused, 1 failed; an error is one line that says who speaks.
TEST(MainTest, ExitCodes) {
  const Ran help = run("--help");
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_NE(help.out.find("--batch-size"), std::string::npos);

  const Ran refused = run("--kv-heads 3");
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_EQ(refused.out.rfind("fsdp-train: LlamaConfig: ", 0), 0u) << refused.out;
  EXPECT_EQ(refused.out.find("frame #"), std::string::npos) << "a stack trace is no message";

  const Ran failed = run("--data /no/such/text.txt");
  EXPECT_EQ(failed.exit_code, 1);
  EXPECT_EQ(failed.out.rfind("fsdp-train: open_tokens: there is no text", 0), 0u) << failed.out;
}

// Promise: a short run ends well, prints lines where there is no terminal, and says what it wrote.
TEST(MainTest, ShortRun) {
  const testing::TemporaryDirectory directory;
  testing::write_sample_text(directory / "text.txt", /*num_lines=*/200);
  const Ran ran =
      run("--steps 2 --layers 1 --hidden-size 16 --heads 2 --intermediate-size 16"
          " --seq-len 16 --batch-size 4 --val-batches 1 --sample-tokens 3 --data " +
          (directory / "text.txt").string() + " --out-dir " + (directory / "out").string());
  EXPECT_EQ(ran.exit_code, 0) << ran.out;
  EXPECT_NE(ran.out.find("step 2/2  loss "), std::string::npos) << ran.out;
  EXPECT_NE(ran.out.find("NOT below the bigram entropy"), std::string::npos) << ran.out;
  EXPECT_EQ(ran.out.find('\r'), std::string::npos);
  EXPECT_TRUE(std::filesystem::exists(directory / "out" / "model.safetensors"));
}

}  // namespace
}  // namespace fsdp::train
