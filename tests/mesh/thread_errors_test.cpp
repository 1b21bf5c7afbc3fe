#include <atomic>
#include <functional>
#include <stdexcept>
#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "fsdp/error.h"
#include "fsdp/process_group.h"
#include "mesh/thread_backend.h"
#include "mesh/work.h"
#include "support/messages.h"

namespace fsdp {
namespace {

using c10d::ReduceOp;
using testing::contains;
using testing::message_thrown_by;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

ThreadBackend& backend_of(const ProcessGroupPtr& group) {
  return dynamic_cast<ThreadBackend&>(*group->getDefaultBackend());
}

// Promise: errors of one rank's own arguments are ConfigErrors that say what is wrong.
TEST(ThreadBackend, BadArguments) {
  run_ranks(1, [&](const ProcessGroupPtr& group) {
    const auto config_error = [&](auto body, const std::string& part) {
      EXPECT_THROW(body(), ConfigError) << part;
      const std::string message = message_thrown_by(body);
      EXPECT_TRUE(contains(message, part)) << message;
    };
    at::Tensor three = at::ones({3}), four = at::ones({4}), ints = at::ones({3}, at::kInt);
    config_error([&] { group->_allgather_base(four, three); },
                 "_allgather_base: the input has 3 elements of Float, so that the output of 1 "
                 "ranks must have 3; found 4 of Float.");
    config_error([&] { group->_reduce_scatter_base(ints, three); }, "found 3 of Float.");
    Tensors strided = {at::ones({3, 2}).t()};
    config_error([&] { group->allreduce(strided); }, "is not contiguous");
    Tensors meta = {at::empty({3}, at::TensorOptions().device(at::kMeta))};
    config_error([&] { backend_of(group).allreduce(meta, {}); },
                 "of the host or of a device, found MetaFloatType on meta");
    c10d::BroadcastOptions root_7;
    root_7.rootRank = 7;
    Tensors one = {three};
    config_error([&] { group->broadcast(one, root_7); }, "root 7 is not a rank of a group of 1");
    c10d::AllreduceOptions bitwise;
    bitwise.reduceOp = ReduceOp::BAND;
    config_error([&] { group->allreduce(one, bitwise); },
                 "the reduction BAND is not defined for tensors of Float");
    config_error([&] { group->send(one, 0, 0); }, "rank 0 is not another rank of a group of 1");
    TensorLists lists = {{three, three}};
    config_error([&] { group->allgather(lists, one); }, "expected 1 tensors in a list of outputs");
    std::vector<int64_t> splits = {5};
    config_error([&] { group->alltoall_base(four, three, splits, splits); },
                 "add up to the 3 rows");
    config_error([&] { group->alltoall(one, one); }, "overlaps");
  });
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    at::Tensor output = at::ones({6});
    at::Tensor wrong_slice = output.narrow(0, 3 * (1 - group->getRank()), 3);
    const std::string message =
        message_thrown_by([&] { group->_allgather_base(output, wrong_slice); });
    EXPECT_TRUE(contains(message, "its own slice of the output")) << message;
  });
}

// Promise: ranks that call different things all learn who called what.
TEST(ThreadBackend, MismatchesAreNamedOnEveryRank) {
  using Call = std::function<c10::intrusive_ptr<c10d::Work>(const ProcessGroupPtr&)>;
  const auto allreduce = [](int64_t numel, at::ScalarType dtype, ReduceOp::RedOpType op) {
    return [=](const ProcessGroupPtr& group) {
      Tensors tensors = {at::ones({numel}, dtype)};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      return group->allreduce(tensors, options);
    };
  };
  const auto broadcast_from = [](int64_t root) {
    return [=](const ProcessGroupPtr& group) {
      Tensors tensors = {at::ones({2})};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return group->broadcast(tensors, options);
    };
  };
  const Call gather = [](const ProcessGroupPtr& group) {
    at::Tensor output = at::ones({36}), input = at::ones({12});
    return group->_allgather_base(output, input);
  };
  const Call all_to_all = [](const ProcessGroupPtr& group) {
    const int64_t extra = group->getRank() == 1;
    std::vector<int64_t> in = {1, 1, 1 + extra}, out = {1, 1, 1};
    at::Tensor input = at::ones({3 + extra}), output = at::ones({3});
    return group->alltoall_base(output, input, out, in);
  };
  struct Case {
    Call of_rank_1, of_others;
    std::string part;
  };
  const std::vector<Case> cases = {
      {gather, allreduce(4, at::kFloat, ReduceOp::SUM),
       "_allgather_base with 12 elements of Float"},
      {allreduce(5, at::kFloat, ReduceOp::SUM), allreduce(4, at::kFloat, ReduceOp::SUM),
       "allreduce with 5 elements of Float, SUM"},
      {allreduce(4, at::kInt, ReduceOp::SUM), allreduce(4, at::kFloat, ReduceOp::SUM),
       "allreduce with 4 elements of Int, SUM"},
      {allreduce(4, at::kFloat, ReduceOp::AVG), allreduce(4, at::kFloat, ReduceOp::SUM), "AVG"},
      {broadcast_from(1), broadcast_from(0), "root 1"},
      {all_to_all, all_to_all,
       "rank 1 called alltoall_base with 2 elements of Float for rank 2, which expects 1"},
  };
  for (const Case& mismatch : cases) {
    std::atomic<int> num_thrown = 0;
    run_ranks(3, [&](const ProcessGroupPtr& group) {
      auto work = (group->getRank() == 1 ? mismatch.of_rank_1 : mismatch.of_others)(group);
      const std::string message = message_thrown_by([&] { work->wait(); });
      EXPECT_TRUE(contains(message, mismatch.part)) << message;
      EXPECT_TRUE(contains(message, "rank 1 called")) << message;
      EXPECT_THROW(work->wait(), CommError);
      EXPECT_FALSE(work->isSuccess());
      EXPECT_NE(work->exception(), nullptr);
      EXPECT_TRUE(work->getFuture()->hasError());
      ++num_thrown;
    });
    EXPECT_EQ(num_thrown, 3);
  }
}

// Promise: a wait is bounded, and the error names the collective, its number and who is missing.
TEST(ThreadBackend, MissingRanksAreNamedAfterTheTimeout) {
  c10d::AllreduceOptions options;
  options.timeout = std::chrono::milliseconds(100);
  std::atomic<int> num_done = 0;
  run_ranks(4, [&](const ProcessGroupPtr& group) {
    group->barrier()->wait();
    if (group->getRank() % 2 == 0) {
      Tensors tensors = {at::ones({3})};
      auto work = group->allreduce(tensors, options);
      const std::string message = message_thrown_by([&] { work->wait(); });
      EXPECT_TRUE(contains(message,
                           "allreduce with 3 elements of Float, SUM (collective 1 of a group of 4 "
                           "ranks): ranks [1, 3] did not join within 100 ms"))
          << message;
      ++num_done;
    }
    while (num_done < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
}

// Promise: a future is bounded as well, though nobody waits for the work; run_ranks's timeout holds
// where the call has none of its own.
TEST(ThreadBackend, FuturesFailAfterTheTimeout) {
  RunRanksOptions options;
  options.timeout = std::chrono::milliseconds(100);
  std::atomic<bool> done = false;
  const auto body = [&](const ProcessGroupPtr& group) {
    if (group->getRank() == 0) {
      Tensors tensors = {at::ones({3})};
      auto future = group->allreduce(tensors)->getFuture();
      const std::string message = message_thrown_by([&] { future->waitAndThrow(); });
      EXPECT_TRUE(contains(message, "ranks [1] did not join within 100 ms")) << message;
      done = true;
    }
    while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  run_ranks(2, body, options);
}

// Promise: a rank that returns early is named at once, not after the timeout.
TEST(ThreadBackend, RanksThatReturnedAreNamedAtOnce) {
  run_ranks(3, [&](const ProcessGroupPtr& group) {
    if (group->getRank() == 1) return;
    Tensors tensors = {at::ones({3})};
    const auto work = group->allreduce(tensors);
    const std::string message = message_thrown_by([&] { wait_for(*work, *group, "layer 7"); });
    EXPECT_TRUE(contains(message, "layer 7: rank 1 has left the job")) << message;
    EXPECT_THROW(wait_for(*work, *group, "layer 7"), CommError);
  });
}

// Promise: a rank that throws frees ranks that wait, in every group; its own error comes out.
TEST(ThreadBackend, ARankThatThrowsFreesTheOthers) {
  std::atomic<int> num_freed = 0;
  const auto body = [&](const ProcessGroupPtr& group) {
    const ProcessGroupPtr half = new_group(group, {0, 1});
    const ProcessGroupPtr lane = new_group(group, {2, 3});
    group->barrier()->wait();
    if (group->getRank() == 1) throw std::out_of_range("rank one is out of range");
    Tensors tensors = {at::ones({3})};
    const auto call = [&] {
      if (group->getRank() == 0) half->allreduce(tensors)->wait();
      if (group->getRank() == 2) lane->recv(tensors, 1, 0)->wait();
      if (group->getRank() == 3) group->barrier()->getFuture()->waitAndThrow();
    };
    const std::string message = message_thrown_by(call);
    EXPECT_TRUE(contains(message, "rank 1 failed: rank one is out of range")) << message;
    const std::string later = message_thrown_by([&] { group->barrier()->wait(); });
    EXPECT_TRUE(contains(later, "rank 1 failed: rank one is out of range")) << later;
    ++num_freed;
    group->barrier()->wait();  // throws a CommError, which is not the first error
  };
  EXPECT_THROW(run_ranks(4, body), std::out_of_range);
  EXPECT_EQ(num_freed, 3);
}

}  // namespace
}  // namespace fsdp
