#include <optional>

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "fsdp/comm_debug.h"
#include "fsdp/fully_shard.h"
#include "reference/world.h"
#include "support/layouts.h"
#include "support/models.h"
#include "support/training.h"

// Class Communication of the reference suite: how many collectives a step takes.

namespace fsdp {
namespace {

using testing::run_world;
using testing::Transformer;

constexpr const char* kAllGather = "_allgather_base_";
constexpr const char* kReduceScatter = "_reduce_scatter_base_";
constexpr int kWorldSize = 4;
constexpr int64_t kNumBlocks = 2;

Transformer sharded_model(Layout layout, const ReshardAfterForward& blocks,
                          const ReshardAfterForward& root) {
  Transformer model = testing::make_model({.num_layers = kNumBlocks});
  for (auto& block : model->blocks) fully_shard(*block, testing::shard_options(layout, blocks));
  fully_shard(*model, testing::shard_options(layout, root));
  return model;
}

at::Tensor loss_of(Transformer& model) {
  return model(at::ones({2, 16}, at::kLong).to(testing::suite_device())).square().mean();
}

class Communication : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(Communication);

struct Row {
  std::string name;
  ReshardAfterForward blocks;
  ReshardAfterForward root;
  int64_t backward_kinds;
  int64_t backward_all_gathers;
};

// Promise: one all-gather for each group in forward; in backward one more where forward has freed,
// and one reduce-scatter for each group. A root whose option is unset stays unsharded: these rows
// are the table of 2.7.1, the others and "unset" that of 2.13.
TEST_P(Communication, test_fully_shard_communication_count) {
  const std::vector<Row> table{{"true", true, true, 2, kNumBlocks + 1},
                               {"2", int64_t{2}, int64_t{2}, 2, kNumBlocks + 1},
                               {"false", false, false, 1, 0},
                               {"unset", {}, {}, 2, kNumBlocks},
                               {"true, root unset", true, {}, 2, kNumBlocks},
                               {"2, root unset", int64_t{2}, {}, 2, kNumBlocks},
                               {"false, root unset", false, {}, 1, 0}};
  for (const Row& row : table) {
    SCOPED_TRACE("reshard_after_forward " + row.name);
    run_world(kWorldSize, [&](const ProcessGroupPtr&) {
      Transformer model = sharded_model(GetParam(), row.blocks, row.root);
      for (int step = 0; step < 2; ++step) {
        CommDebugMode forward;
        const at::Tensor loss = loss_of(model);
        EXPECT_EQ(forward.num_kinds(), 1);
        EXPECT_EQ(forward.count(kAllGather), kNumBlocks + 1);
        EXPECT_EQ(forward.total(), kNumBlocks + 1);

        CommDebugMode backward;
        loss.backward();
        testing::note_value(loss);
        testing::note_gradients(*model);
        EXPECT_EQ(backward.num_kinds(), row.backward_kinds);
        EXPECT_EQ(backward.count(kAllGather), row.backward_all_gathers);
        EXPECT_EQ(backward.count(kReduceScatter), kNumBlocks + 1);
        EXPECT_EQ(backward.total(), row.backward_all_gathers + kNumBlocks + 1);
      }
    });
  }
}

// Promise: what was resharded by hand after forward is gathered in backward; also the root whose
// option is unset.
TEST_P(Communication, test_manual_reshard_with_reshard_after_forward_false) {
  for (const ReshardAfterForward& root : {ReshardAfterForward(false), ReshardAfterForward()}) {
    run_world(kWorldSize, [&](const ProcessGroupPtr&) {
      Transformer model = sharded_model(GetParam(), /*blocks=*/false, root);
      CommDebugMode forward;
      const at::Tensor loss = loss_of(model);
      EXPECT_EQ(forward.num_kinds(), 1);
      EXPECT_EQ(forward.count(kAllGather), kNumBlocks + 1);

      for (auto& block : model->blocks) block->reshard();
      model->reshard();
      CommDebugMode backward;
      loss.backward();
      testing::note_value(loss);
      testing::note_gradients(*model);
      EXPECT_EQ(backward.num_kinds(), 2);
      EXPECT_EQ(backward.count(kAllGather), kNumBlocks + 1);
      EXPECT_EQ(backward.count(kReduceScatter), kNumBlocks + 1);
    });
  }
}

// Promise: set_reshard_after_forward() counts from the next forward on, for the module alone or for
// all below it, whatever fully_shard() was told; the root too, whose option was unset.
TEST_P(Communication, test_set_reshard_after_forward) {
  struct SetCase {
    const char* name;
    std::optional<bool> value;
    bool recurse;
    int64_t backward_all_gathers;
  };
  const SetCase table[] = {{"not called", {}, true, kNumBlocks},
                           {"true", true, true, kNumBlocks + 1},
                           {"true, the root alone", true, false, 1},
                           {"false", false, true, 0},
                           {"false, the root alone", false, false, kNumBlocks}};
  for (const SetCase& options : table) {
    SCOPED_TRACE(options.name);
    run_world(kWorldSize, [&](const ProcessGroupPtr&) {
      ReshardAfterForward before;
      if (options.value) before = !*options.value;
      Transformer model = sharded_model(GetParam(), before, before);
      if (options.value) model->set_reshard_after_forward(*options.value, options.recurse);
      CommDebugMode forward;
      const at::Tensor loss = loss_of(model);
      EXPECT_EQ(forward.count(kAllGather), kNumBlocks + 1);
      EXPECT_EQ(forward.total(), kNumBlocks + 1);

      CommDebugMode backward;
      loss.backward();
      testing::note_value(loss);
      testing::note_gradients(*model);
      EXPECT_EQ(backward.num_kinds(), options.backward_all_gathers == 0 ? 1 : 2);
      EXPECT_EQ(backward.count(kAllGather), options.backward_all_gathers);
      EXPECT_EQ(backward.count(kReduceScatter), kNumBlocks + 1);
      EXPECT_EQ(backward.total(), options.backward_all_gathers + kNumBlocks + 1);
    });
  }
}

}  // namespace
}  // namespace fsdp
