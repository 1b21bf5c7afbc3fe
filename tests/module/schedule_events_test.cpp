#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "fsdp/events.h"
#include "fsdp/fully_shard.h"
#include "fsdp/process_group.h"
#include "support/layouts.h"
#include "support/models.h"

// What an observer of the schedule is told. The lists of events are in tests/reference.

namespace fsdp {
namespace {

class ScheduleEvents : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(ScheduleEvents);

// Promise: an observer is told of every call, whether it is a prefetch, and whether it did
// anything.
TEST_P(ScheduleEvents, PrefetchAndChangedAreTold) {
  struct Flags : ScheduleObserver {
    void on_event(const ScheduleEvent& event) override {
      lines.push_back(std::string(to_string(event.kind)) + " " + event.module_path +
                      (event.prefetch ? " prefetch" : "") + (event.changed ? " changed" : ""));
    }
    std::vector<std::string> lines;
  };
  run_ranks(2, [](const ProcessGroupPtr&) {
    testing::MLP model(4);
    fully_shard(*model->in_proj, {.layout = GetParam()});
    fully_shard(*model->out_proj, {.layout = GetParam()});
    FSDPModule& root = fully_shard(*model, {.layout = GetParam()});
    const auto flags = std::make_shared<Flags>();
    set_schedule_observer(*model, flags);
    const at::Tensor y = model(at::ones({1, 4}).set_requires_grad(true)).sum();
    EXPECT_EQ(flags->lines,
              (std::vector<std::string>{"unshard in_proj changed", "reshard in_proj changed",
                                        "unshard out_proj changed", "reshard out_proj changed"}));
    flags->lines.clear();
    y.backward();
    EXPECT_EQ(flags->lines,
              (std::vector<std::string>{
                  "unshard out_proj changed", "unshard in_proj prefetch changed",
                  "reshard out_proj changed", "post_backward out_proj changed", "unshard in_proj",
                  "reshard in_proj changed", "post_backward in_proj changed"}));
    flags->lines.clear();
    model->in_proj->reshard();
    EXPECT_EQ(flags->lines, (std::vector<std::string>{"reshard in_proj"}));
    flags->lines.clear();
    set_schedule_observer(*model, nullptr);
    root.unshard();
    model->in_proj->unshard();
    EXPECT_TRUE(flags->lines.empty());
  });
}

}  // namespace
}  // namespace fsdp
