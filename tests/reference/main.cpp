#include <cstdio>
#include <string>

#include <gtest/gtest.h>

#include "fsdp/process_group.h"
#include "reference/world.h"

// The reference suite: `reference_test` with ranks as threads, or, one rank of several,
// `torchrun --nproc-per-node=4 --no-python reference_test --processes`.

namespace fsdp::testing {

SuiteOptions& suite_options() {
  static SuiteOptions options;
  return options;
}

void run_world(int world_size, const std::function<void(const ProcessGroupPtr&)>& body) {
  if (!suite_options().processes) {
    run_ranks(world_size, body);
    return;
  }
  const ProcessGroupPtr group = default_process_group();
  body(group);
  group->barrier()->wait();  // the next test's calls are its own
}

}  // namespace fsdp::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--processes") {
      fsdp::testing::suite_options().processes = true;
    } else {
      std::fprintf(stderr, "reference_test: unknown argument %s; there is --processes\n", argv[i]);
      return 2;
    }
  }
  if (fsdp::testing::suite_options().processes) fsdp::init_process_group();
  const int result = RUN_ALL_TESTS();
  if (fsdp::testing::suite_options().processes) fsdp::destroy_process_group();
  return result;
}
