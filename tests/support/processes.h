#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

// Ranks as processes of this machine, for tests.
namespace fsdp::testing {

using Variables = std::map<std::string, std::string>;

/// A TCP port of this machine that nobody listens on now.
int free_port();

/// A process that a test started; killed at the latest when the object goes.
class Process {
 public:
  /// Starts `command` with `variables` added to the environment; stderr is dropped.
  Process(const std::vector<std::string>& command, const Variables& variables);
  Process(Process&& other) noexcept;
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process();

  /// What it printed, once it has ended; "killed" if by a signal.
  std::string result();
  void kill();

 private:
  pid_t pid_ = -1;
  int output_ = -1;
};

/// torchrun's variables for one rank of a job on this machine.
Variables rank_variables(int rank, int world_size, int port);

}  // namespace fsdp::testing
