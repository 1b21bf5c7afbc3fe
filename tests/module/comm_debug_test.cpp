#include "fsdp/comm_debug.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/fully_shard.h"
#include "support/layouts.h"
#include "support/models.h"
#include "support/training.h"

// What CommDebugMode counts. The tables of FSDP2's own tests are in tests/reference.

namespace fsdp {
namespace {

using testing::Transformer;

constexpr const char* kAllGather = "_allgather_base_";
constexpr const char* kReduceScatter = "_reduce_scatter_base_";
constexpr const char* kAllReduce = "allreduce_";
constexpr int kWorldSize = 4;
constexpr int64_t kNumBlocks = 2;

Transformer sharded_model(const FullyShardOptions& options) {
  Transformer model = testing::make_model({.num_layers = kNumBlocks});
  testing::shard_blocks_and_root(model, options);
  return model;
}

at::Tensor loss_of(Transformer& model) {
  return model(at::ones({2, 16}, at::kLong)).square().mean();
}

class CommunicationCount : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(CommunicationCount);

// Promise: over a mesh that also replicates, one all-reduce follows each reduce-scatter; without
// set_requires_all_reduce none does.
TEST_P(CommunicationCount, OfHsdpHasAsManyAllReducesAsReduceScatters) {
  run_ranks(kWorldSize, [&](const ProcessGroupPtr&) {
    Transformer model =
        sharded_model({.mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"}),
                       .reshard_after_forward = true,
                       .layout = GetParam()});
    for (const bool all_reduces : {false, true}) {
      model->set_requires_all_reduce(all_reduces);
      const at::Tensor loss = loss_of(model);
      CommDebugMode backward;
      loss.backward();
      EXPECT_EQ(backward.count(kAllGather), kNumBlocks + 1);
      EXPECT_EQ(backward.count(kReduceScatter), kNumBlocks + 1);
      EXPECT_EQ(backward.count(kAllReduce), all_reduces ? kNumBlocks + 1 : 0);
      EXPECT_EQ(backward.num_kinds(), all_reduces ? 3 : 2);
      for (const std::string path : {"", " (layers.0)", " (layers.1)"}) {
        const auto range = backward.counts_by_range().find("FSDP::all_reduce" + path);
        ASSERT_EQ(range != backward.counts_by_range().end(), all_reduces) << path;
        if (all_reduces) EXPECT_EQ(range->second.at(kAllReduce).calls, 1) << path;
      }
    }
  });
}

// Promise: of a group of one rank nothing is communicated.
TEST_P(CommunicationCount, OfOneRankIsZero) {
  run_ranks(1, [&](const ProcessGroupPtr&) {
    Transformer model = sharded_model({.layout = GetParam()});
    const CommDebugMode comm;
    loss_of(model).backward();
    EXPECT_EQ(comm.total(), 0);
    EXPECT_EQ(comm.num_kinds(), 0);
  });
}

// Promise: a sharded module's collectives stand under its path.
TEST_P(CommunicationCount, IsKnownByModule) {
  run_ranks(kWorldSize, [&](const ProcessGroupPtr&) {
    Transformer model = sharded_model({.reshard_after_forward = true, .layout = GetParam()});
    const CommDebugMode comm;
    loss_of(model).backward();
    for (const std::string path : {"", " (layers.0)", " (layers.1)"}) {
      const auto& by_range = comm.counts_by_range();
      ASSERT_EQ(by_range.count("FSDP::all_gather" + path), 1u) << path;
      EXPECT_EQ(by_range.at("FSDP::all_gather" + path).at(kAllGather).calls, 2) << path;
      ASSERT_EQ(by_range.count("FSDP::post_backward_reduce" + path), 1u) << path;
      EXPECT_EQ(by_range.at("FSDP::post_backward_reduce" + path).at(kReduceScatter).calls, 1);
    }
    EXPECT_EQ(comm.counts_by_range().size(), 6u);
  });
}

// Promise: a gather moves the parameters' bytes and no more than their padding.
TEST(CommDebugMode, KnowsTheBytesOfAStep) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    fsdp::nn::Linear model(torch::nn::LinearOptions(6, 4).bias(false));
    fully_shard(*model, {.reshard_after_forward = true, .layout = Layout::kPerParameter});
    const CommDebugMode comm;
    model(at::ones({1, 6})).sum().backward();
    EXPECT_EQ(comm.bytes(kAllGather), 2 * 4 * 6 * 4);  // forward and backward, rows, columns, bytes
    EXPECT_GE(comm.bytes(kReduceScatter), 4 * 6 * 4);  // and the flags of docs/design.md
    EXPECT_LE(comm.bytes(kReduceScatter), 4 * 6 * 4 + 2 * 16);
  });
}

// Promise: every operation of c10d is counted by its name, with the larger of what goes in and
// what comes out.
TEST(CommDebugMode, CountsEveryOperation) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    at::Tensor part = at::ones({3}), whole = at::ones({6});  // 12 and 24 bytes
    std::vector<at::Tensor> parts{part}, wholes{whole};
    std::vector<std::vector<at::Tensor>> lists{{at::zeros({3}), at::zeros({3})}};
    CommDebugMode comm;
    group->_allgather_base(whole, part)->wait();
    group->_reduce_scatter_base(part, whole)->wait();
    group->allgather(lists, parts)->wait();
    group->reduce_scatter(parts, lists)->wait();
    group->allgather_into_tensor_coalesced(wholes, parts)->wait();
    group->reduce_scatter_tensor_coalesced(parts, wholes)->wait();
    group->allreduce(parts)->wait();
    group->allreduce(parts)->wait();
    group->broadcast(wholes)->wait();
    group->barrier()->wait();
    if (group->getRank() == 0) {
      group->send(parts, 1, 0)->wait();
    } else {
      group->recv(parts, 0, 0)->wait();
    }

    std::map<std::string, std::pair<int64_t, int64_t>> expected{
        {"_allgather_base_", {1, 24}},
        {"_reduce_scatter_base_", {1, 24}},
        {"allgather_", {1, 24}},
        {"reduce_scatter_", {1, 24}},
        {"allgather_into_tensor_coalesced_", {1, 24}},
        {"reduce_scatter_tensor_coalesced_", {1, 24}},
        {"allreduce_", {2, 24}},
        {"broadcast_", {1, 24}},
        {"barrier", {1, 0}},
        {group->getRank() == 0 ? "send" : "recv_", {1, 12}}};
    std::map<std::string, std::pair<int64_t, int64_t>> found;
    for (const auto& [name, count] : comm.counts()) found[name] = {count.calls, count.bytes};
    EXPECT_EQ(found, expected);
    EXPECT_EQ(comm.total(), 11);
    EXPECT_EQ(comm.num_kinds(), 10);
    EXPECT_EQ(comm.count("gather_"), 0);

    comm.reset();
    EXPECT_EQ(comm.total(), 0);
  });
}

void all_reduce(const ProcessGroupPtr& group) {
  std::vector<at::Tensor> tensors{at::ones({4})};
  group->allreduce(tensors)->wait();
}

// Promise: a scope counts what happens while it is alive, whatever others begin and end meanwhile.
TEST(CommDebugMode, ScopesMayBeNested) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    all_reduce(group);
    auto first = std::make_unique<CommDebugMode>();
    all_reduce(group);
    {
      const CommDebugMode inner;
      all_reduce(group);
      EXPECT_EQ(inner.total(), 1);
    }
    EXPECT_EQ(first->total(), 2);
    const CommDebugMode second;
    all_reduce(group);
    EXPECT_EQ(first->total(), 3);
    first.reset();  // not the last that began
    all_reduce(group);
    EXPECT_EQ(second.total(), 2);
  });
}

// Promise: a rank counts its own calls only, though all ranks are threads of one process.
TEST(CommDebugMode, DoesNotSeeOtherRanks) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    const ProcessGroupPtr pair = new_group(group, {0, 1});
    const CommDebugMode comm;
    for (int i = 0; pair && i < 5; ++i) all_reduce(pair);
    all_reduce(group);
    EXPECT_EQ(comm.count(kAllReduce), pair ? 6 : 1);
  });
}

// Promise: calls stand under the innermost range, also one that a scope begins or ends within.
TEST(CommDebugMode, KnowsNamedRanges) {
  run_ranks(1, [](const ProcessGroupPtr& group) {
    const auto calls_in = [](const CommDebugMode& comm, const std::string& range) {
      const auto found = comm.counts_by_range().find(range);
      return found == comm.counts_by_range().end() ? 0 : found->second.at(kAllReduce).calls;
    };
    auto outer = std::make_unique<CommDebugMode>();
    {
      RECORD_USER_SCOPE("step");
      all_reduce(group);
      {
        RECORD_USER_SCOPE("norm");
        all_reduce(group);
        EXPECT_EQ(calls_in(*outer, "norm"), 1);
        outer.reset();
      }
      outer = std::make_unique<CommDebugMode>();
      all_reduce(group);
      EXPECT_EQ(calls_in(*outer, "step"), 1);
    }
    all_reduce(group);
    EXPECT_EQ(calls_in(*outer, ""), 1);
    EXPECT_EQ(outer->total(), 2);
  });
}

// Promise: nothing is observed once the last scope has ended.
TEST(CommDebugMode, LeavesNoObserverBehind) {
  run_ranks(1, [](const ProcessGroupPtr&) {
    EXPECT_FALSE(at::hasThreadLocalCallbacks());
    { const CommDebugMode comm, other; }
    EXPECT_FALSE(at::hasThreadLocalCallbacks());
  });
}

}  // namespace
}  // namespace fsdp
