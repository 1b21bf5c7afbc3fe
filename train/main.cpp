#include <cstdio>
#include <exception>
#include <string>

#include "fsdp/error.h"
#include "train/config.h"
#include "train/trainer.h"

namespace {

/// What the shell sees.
enum ExitCode { kDone = 0, kFailed = 1, kRefused = 2 };

ExitCode fail(ExitCode code, const std::exception& error) {
  std::fflush(stdout);
  std::fprintf(stderr, "fsdp-train: %s\n", fsdp::message_of(error).c_str());
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto line =
        fsdp::train::parse_command_line({argv + 1, argv + argc}, fsdp::train::find_launcher());
    if (!line.text.empty()) {
      std::fputs(line.text.c_str(), stdout);
      return kDone;
    }
    fsdp::train::train(line.config);
    return kDone;
  } catch (const fsdp::ConfigError& error) {
    return fail(kRefused, error);
  } catch (const std::exception& error) {
    return fail(kFailed, error);
  }
}
