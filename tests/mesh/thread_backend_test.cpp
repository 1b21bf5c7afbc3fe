#include "mesh/thread_backend.h"

#include <atomic>
#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "fsdp/process_group.h"
#include "support/reduce_ops.h"

namespace fsdp {
namespace {

using c10d::ReduceOp;
using testing::factor_of;
using testing::reduce_op;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// Values whose sums need rounding, so that the order of the sum shows.
at::Tensor values(int rank, int64_t numel, at::ScalarType dtype) {
  const at::Tensor index = at::arange(numel, at::kDouble) + 1;
  const at::Tensor wave = at::sin(index * (rank + 1) * 0.7) * 3;
  if (dtype == at::kBool) return wave > 0;
  if (at::isIntegralType(dtype, false)) return at::abs(wave * 3).to(dtype);
  return wave.to(dtype);
}

template <typename Make>
Tensors of_all_ranks(int world_size, Make make) {
  Tensors all;
  for (int rank = 0; rank < world_size; ++rank) all.push_back(make(rank));
  return all;
}

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp::RedOpType op) {
  const bool is_bool = a.scalar_type() == at::kBool;
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::AVG:
    case ReduceOp::PREMUL_SUM:
      return is_bool ? at::logical_or(a, b) : a + b;
    case ReduceOp::PRODUCT:
      return is_bool ? at::logical_and(a, b) : a * b;
    case ReduceOp::MIN:
      return at::minimum(a, b);
    case ReduceOp::MAX:
      return at::maximum(a, b);
    case ReduceOp::BAND:
      return at::bitwise_and(a, b);
    case ReduceOp::BOR:
      return at::bitwise_or(a, b);
    case ReduceOp::BXOR:
      return at::bitwise_xor(a, b);
    case ReduceOp::UNUSED:
      break;
  }
  return a;
}

// The same with torch: in rank order, half precision in float, rounded once.
at::Tensor reference(const Tensors& inputs, ReduceOp::RedOpType op) {
  const at::ScalarType dtype = inputs[0].scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  const at::ScalarType sum_dtype = half ? at::kFloat : dtype;
  at::Tensor sum;
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    at::Tensor input = inputs[rank].to(sum_dtype);
    if (op == ReduceOp::PREMUL_SUM) {
      input = input * at::full({}, factor_of(static_cast<int>(rank)), sum_dtype);
    }
    sum = rank == 0 ? input : combine(sum, input, op);
  }
  if (op == ReduceOp::AVG) {
    const at::Scalar count(static_cast<int64_t>(inputs.size()));
    sum = at::isIntegralType(dtype, false) ? at::div(sum, count, "trunc") : sum / count;
  }
  return sum.to(dtype);
}

struct Reduction {
  at::ScalarType dtype;
  ReduceOp::RedOpType op;
};

std::vector<Reduction> all_reductions() {
  std::vector<Reduction> all;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte,
                                     at::kChar, at::kShort, at::kInt, at::kLong, at::kBool}) {
    for (const auto op : {ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX}) {
      all.push_back({dtype, op});
    }
    if (dtype != at::kBool) all.push_back({dtype, ReduceOp::AVG});
    if (at::isFloatingType(dtype)) all.push_back({dtype, ReduceOp::PREMUL_SUM});
    if (at::isIntegralType(dtype, true)) {
      for (const auto op : {ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR}) {
        all.push_back({dtype, op});
      }
    }
  }
  return all;
}

void expect_equal(const at::Tensor& found, const at::Tensor& expected, const std::string& where) {
  EXPECT_EQ(found.scalar_type(), expected.scalar_type()) << where;
  EXPECT_TRUE(at::equal(found, expected)) << where;
}

class ThreadBackendTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, ThreadBackendTest, ::testing::Values(1, 2, 3, 5, 8));

// Promise: every reduction of every dtype has the bits of a sum in rank order, in all of its forms.
TEST_P(ThreadBackendTest, ReductionsHaveTheBitsOfASumInRankOrder) {
  const int n = GetParam();
  for (const auto& [dtype, op] : all_reductions()) {
    for (const int64_t numel : {int64_t{0}, int64_t{3}, int64_t{9001}}) {
      if (numel > 3 && op != ReduceOp::SUM && op != ReduceOp::AVG) continue;
      const Tensors inputs =
          of_all_ranks(n, [&](int rank) { return values(rank, numel * n, dtype); });
      const at::Tensor expected = reference(inputs, op);
      const std::string where = c10::str(dtype, " op ", int(op), " numel ", numel);
      run_ranks(n, [&](const ProcessGroupPtr& group) {
        const int rank = group->getRank();
        c10d::AllreduceOptions all;
        all.reduceOp = reduce_op(op, rank);
        Tensors tensors = {inputs[rank].clone()};
        group->allreduce(tensors, all)->wait();
        expect_equal(tensors[0], expected, "allreduce " + where);

        c10d::ReduceScatterOptions scatter;
        scatter.reduceOp = reduce_op(op, rank);
        at::Tensor input = inputs[rank].clone();
        at::Tensor output = at::empty({numel}, dtype);
        group->_reduce_scatter_base(output, input, scatter)->wait();
        expect_equal(output, expected.narrow(0, rank * numel, numel), "reduce_scatter " + where);
        expect_equal(input, inputs[rank], "input of reduce_scatter " + where);

        c10d::ReduceOptions to_root;
        to_root.reduceOp = reduce_op(op, rank);
        to_root.rootRank = n - 1;
        tensors = {inputs[rank].clone()};
        group->reduce(tensors, to_root)->wait();
        expect_equal(tensors[0], rank == n - 1 ? expected : inputs[rank], "reduce " + where);
      });
    }
  }
}

// Promise: a reduce-scatter may write to its own slice of the input, or to any other part of it.
TEST_P(ThreadBackendTest, ReduceScatterInPlace) {
  const int n = GetParam();
  const int64_t numel = 5003;
  const Tensors inputs = of_all_ranks(n, [&](int r) { return values(r, numel * n, at::kFloat); });
  const at::Tensor expected = reference(inputs, ReduceOp::SUM);
  run_ranks(n, [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    for (const int64_t begin :
         {rank * numel, int64_t{0}, (n - 1) * numel, numel * n / 2 - numel / 2}) {
      at::Tensor input = inputs[rank].clone();
      at::Tensor output = input.narrow(0, begin, numel);
      group->_reduce_scatter_base(output, input)->wait();
      expect_equal(output, expected.narrow(0, rank * numel, numel), c10::str("at ", begin));
    }
  });
}

// Promise: coalesced forms and lists do what the single forms do, also with mixed dtypes and sizes.
TEST_P(ThreadBackendTest, CoalescedFormsAndLists) {
  const int n = GetParam();
  run_ranks(n, [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    const auto of = [&](at::ScalarType dtype, int64_t numel) {
      return of_all_ranks(n, [&](int r) { return values(r, numel, dtype); });
    };
    const Tensors floats = of(at::kFloat, 7 * n), longs = of(at::kLong, 3 * n),
                  none = of(at::kFloat, 0);

    Tensors reduced = {floats[rank].clone(), longs[rank].clone(), none[rank].clone()};
    group->allreduce_coalesced(reduced)->wait();
    expect_equal(reduced[0], reference(floats, ReduceOp::SUM), "allreduce_coalesced");
    expect_equal(reduced[1], reference(longs, ReduceOp::SUM), "allreduce_coalesced");

    Tensors inputs = {floats[rank], longs[rank], none[rank]};
    Tensors outputs = {at::empty({7 * n * n}), at::empty({3 * n * n}, at::kLong), at::empty({0})};
    group->allgather_into_tensor_coalesced(outputs, inputs)->wait();
    expect_equal(outputs[0], at::cat(floats), "allgather_into_tensor_coalesced");
    expect_equal(outputs[1], at::cat(longs), "allgather_into_tensor_coalesced");

    Tensors shards = {at::empty({7}), at::empty({3}, at::kLong), at::empty({0})};
    group->reduce_scatter_tensor_coalesced(shards, inputs)->wait();
    expect_equal(shards[0], reference(floats, ReduceOp::SUM).narrow(0, rank * 7, 7),
                 "rs coalesced");
    expect_equal(shards[1], reference(longs, ReduceOp::SUM).narrow(0, rank * 3, 3), "rs coalesced");

    TensorLists lists(2);
    for (int r = 0; r < n; ++r) lists[0].push_back(at::empty({7 * n}));
    for (int r = 0; r < n; ++r) lists[1].push_back(at::empty({3 * n}, at::kLong));
    Tensors two = {floats[rank], longs[rank]};
    group->allgather_coalesced(lists, two)->wait();
    for (int r = 0; r < n; ++r) expect_equal(lists[0][r], floats[r], "allgather_coalesced");
    for (int r = 0; r < n; ++r) expect_equal(lists[1][r], longs[r], "allgather_coalesced");

    // Uneven lists: rank r contributes, or gets, r elements.
    TensorLists gathered(1), to_scatter(1);
    for (int r = 0; r < n; ++r) gathered[0].push_back(at::empty({r}));
    Tensors mine = {at::full({rank}, rank + 0.5)};
    group->allgather(gathered, mine)->wait();
    for (int r = 0; r < n; ++r) expect_equal(gathered[0][r], at::full({r}, r + 0.5), "allgather");
    for (int r = 0; r < n; ++r) to_scatter[0].push_back(at::full({r}, rank + 1.0));
    Tensors shard = {at::empty({rank})};
    group->reduce_scatter(shard, to_scatter)->wait();
    expect_equal(shard[0], at::full({rank}, n * (n + 1) / 2.0), "reduce_scatter");
  });
}

// Promise: what moves data without arithmetic moves it exactly, for every dtype.
TEST_P(ThreadBackendTest, DataMovesExactly) {
  const int n = GetParam();
  run_ranks(n, [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kByte, at::kBool, at::kLong,
                                       at::kComplexFloat, at::kFloat8_e4m3fn}) {
      const auto of = [&](int r, int64_t numel) {
        return dtype == at::kFloat8_e4m3fn ? values(r, numel, at::kFloat).to(dtype)
                                           : values(r, numel, dtype);
      };
      const auto bits_equal = [&](const at::Tensor& found, const at::Tensor& expected) {
        expect_equal(found.view(at::kByte), expected.view(at::kByte), c10::str(dtype));
      };
      const Tensors all = of_all_ranks(n, [&](int r) { return of(r, 40); });
      for (int root = 0; root < n; ++root) {
        c10d::BroadcastOptions options;
        options.rootRank = root;
        Tensors tensors = {all[rank].clone()};
        group->broadcast(tensors, options)->wait();
        bits_equal(tensors[0], all[root]);

        c10d::GatherOptions gather;
        gather.rootRank = root;
        Tensors input = {all[rank]};
        TensorLists outputs;
        if (rank == root) outputs = {of_all_ranks(n, [&](int) { return at::empty({40}, dtype); })};
        group->gather(outputs, input, gather)->wait();
        for (int r = 0; rank == root && r < n; ++r) bits_equal(outputs[0][r], all[r]);

        c10d::ScatterOptions scatter;
        scatter.rootRank = root;
        Tensors output = {at::empty({40}, dtype)};
        TensorLists inputs;
        if (rank == root) inputs = {all};
        group->scatter(output, inputs, scatter)->wait();
        bits_equal(output[0], all[rank]);
      }
      at::Tensor output = at::empty({40 * n}, dtype);
      at::Tensor input = all[rank];
      group->_allgather_base(output, input)->wait();
      for (int r = 0; r < n; ++r) bits_equal(output.narrow(0, 40 * r, 40), all[r]);
      at::Tensor in_place = at::empty({40 * n}, dtype);
      at::Tensor slice = in_place.narrow(0, 40 * rank, 40);
      slice.view(at::kByte).copy_(all[rank].view(at::kByte));
      group->_allgather_base(in_place, slice)->wait();
      bits_equal(in_place, output);
    }
  });
}

// Promise: all-to-all sends piece d of rank s to place s of rank d: equal, split, lists.
TEST_P(ThreadBackendTest, AllToAll) {
  const int n = GetParam();
  run_ranks(n, [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    std::vector<int64_t> none;
    at::Tensor input = at::arange(n, at::kLong) + 100 * rank;
    at::Tensor output = at::empty({n}, at::kLong);
    group->alltoall_base(output, input, none, none)->wait();
    expect_equal(output, at::arange(n, at::kLong) * 100 + rank, "equal");

    // Rank s sends s + d rows of two columns to rank d.
    std::vector<int64_t> in_splits, out_splits;
    Tensors sent, expected, lists;
    for (int peer = 0; peer < n; ++peer) {
      in_splits.push_back(rank + peer);
      out_splits.push_back(rank + peer);
      sent.push_back(at::full({rank + peer, 2}, rank * 100 + peer, at::kInt));
      expected.push_back(at::full({rank + peer, 2}, peer * 100 + rank, at::kInt));
      lists.push_back(at::empty({rank + peer, 2}, at::kInt));
    }
    at::Tensor flat_in = at::cat(sent);
    at::Tensor flat_out = at::empty_like(at::cat(expected));
    group->alltoall_base(flat_out, flat_in, out_splits, in_splits)->wait();
    expect_equal(flat_out, at::cat(expected), "split");
    group->alltoall(lists, sent)->wait();
    expect_equal(at::cat(lists), at::cat(expected), "lists");
  });
}

// Promise: sends meet their receives in order, per pair and tag.
TEST(ThreadBackend, SendAndReceive) {
  run_ranks(3, [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    const int next = (rank + 1) % 3, previous = (rank + 2) % 3;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    TensorLists sent, received;
    for (int i = 0; i < 4; ++i) {
      sent.push_back({at::full({5}, 10 * rank + i, at::kLong)});
      received.push_back({at::empty({5}, at::kLong)});
    }
    for (int i = 0; i < 4; ++i) works.push_back(group->send(sent[i], next, /*tag=*/i % 2));
    for (int i = 0; i < 4; ++i) works.push_back(group->recv(received[i], previous, i % 2));
    for (auto it = works.rbegin(); it != works.rend(); ++it) (*it)->wait();
    for (int i = 0; i < 4; ++i) {
      expect_equal(received[i][0], at::full({5}, 10 * previous + i, at::kLong), c10::str(i));
    }
  });
}

// Promise: ranks may wait for several collectives in different orders, or not at all.
TEST_P(ThreadBackendTest, RanksWaitInAnyOrder) {
  const int n = GetParam();
  constexpr int kWorks = 7;
  for (int repeat = 0; repeat < 10; ++repeat) {
    run_ranks(n, [&](const ProcessGroupPtr& group) {
      const int rank = group->getRank();
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      TensorLists tensors;
      for (int i = 0; i < kWorks; ++i) {
        tensors.push_back({at::full({20000 * (i + 1)}, rank + i, at::kFloat)});
        works.push_back(group->allreduce(tensors.back()));
      }
      for (int i = 0; i < kWorks; ++i) {
        const int which = (i * (rank % 2 == 0 ? 3 : 5) + rank) % kWorks;
        works[which]->wait();
        EXPECT_EQ(tensors[which][0][0].item<float>(), n * (n - 1) / 2 + n * which);
        tensors[which][0].fill_(-1);  // nobody reads it any more
      }
      group->barrier()->wait();
    });
  }
}

// Promise: after wait() a rank may overwrite its input, though peers have not waited yet.
TEST_P(ThreadBackendTest, InputsAreFreeAfterWait) {
  const int n = GetParam();
  run_ranks(n, [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    at::Tensor input = at::empty({100000});
    at::Tensor output = at::empty({100000 * n});
    for (int step = 0; step < 20; ++step) {
      input.fill_(step * 100 + rank);
      group->_allgather_base(output, input)->wait();
      input.fill_(-1);
      for (int r = 0; r < n; ++r) {
        const at::Tensor part = output.narrow(0, r * 100000, 100000);
        EXPECT_TRUE(part.eq(step * 100 + r).all().item<bool>());
      }
    }
  });
}

// Promise: the same inputs give the same bits every time, however the work is shared out.
TEST(ThreadBackend, ResultsAreTheSameEveryTime) {
  const int n = 8;
  const Tensors inputs = of_all_ranks(n, [](int r) { return values(r, 100003, at::kBFloat16); });
  at::Tensor first;
  for (int repeat = 0; repeat < 20; ++repeat) {
    run_ranks(n, [&](const ProcessGroupPtr& group) {
      Tensors tensors = {inputs[group->getRank()].clone()};
      group->allreduce(tensors)->wait();
      if (group->getRank() == repeat % n) {
        if (repeat == 0) first = tensors[0];
        expect_equal(tensors[0], first, "repeat");
      }
    });
  }
}

// Promise: a future completes for a rank that never waits, if nobody ever waits, and late askers
// get a completed one.
TEST_P(ThreadBackendTest, FuturesCompleteWithoutWait) {
  const int n = GetParam();
  run_ranks(n, [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    for (const int64_t numel : {int64_t{4}, int64_t{100000}}) {
      Tensors a = {at::full({numel}, rank + 1.0)}, b = {at::full({numel}, 2.0)};
      auto work_a = group->allreduce(a);
      auto work_b = group->allreduce(b);
      auto future_b = work_b->getFuture();
      auto future_a = work_a->getFuture();
      std::atomic<bool> called = false;
      auto child = future_a->then(
          [&](c10::ivalue::Future&) {
            called = true;
            return c10::IValue();
          },
          c10::NoneType::get());
      if (rank % 2 == 0) future_b->waitAndThrow();
      future_a->waitAndThrow();
      child->wait();
      EXPECT_TRUE(called);
      EXPECT_TRUE(work_a->isCompleted());
      EXPECT_TRUE(work_a->isSuccess());
      EXPECT_EQ(future_a->value().toTensorVector()[0][numel - 1].item<float>(), n * (n + 1) / 2);
      future_b->waitAndThrow();
      work_b->wait();
      EXPECT_TRUE(work_b->getFuture()->completed());
      EXPECT_EQ(work_b->result()[0][0].item<float>(), 2 * n);
    }
  });
}

// Promise: who only polls sees the work get done.
TEST(ThreadBackend, PollingMakesProgress) {
  run_ranks(3, [&](const ProcessGroupPtr& group) {
    Tensors tensors = {at::ones({100000})};
    auto work = group->allreduce(tensors);
    while (!work->isCompleted()) std::this_thread::yield();
    EXPECT_EQ(tensors[0][99999].item<float>(), 3);
  });
}

// Promise: 128 ranks on any machine start, gather, reduce and agree, in seconds.
TEST(ThreadBackend, Runs128Ranks) {
  std::atomic<int> right = 0;
  run_ranks(128, [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    for (int step = 0; step < 5; ++step) {
      Tensors tensors = {at::full({4}, rank, at::kLong)};
      group->allreduce(tensors)->wait();
      at::Tensor input = at::full({3}, rank, at::kInt), output = at::empty({384}, at::kInt);
      group->_allgather_base(output, input)->wait();
      at::Tensor wide = at::arange(128 * 50, at::kFloat), shard = at::empty({50});
      group->_reduce_scatter_base(shard, wide)->wait();
      right += tensors[0][0].item<int64_t>() == 127 * 64 && output[383].item<int>() == 127 &&
               shard[1].item<float>() == 128 * (rank * 50 + 1);
    }
  });
  EXPECT_EQ(right, 5 * 128);
}

// Promise: sub-groups are made without communication of outsiders and work beside each other.
TEST(ThreadBackend, SubGroups) {
  run_ranks(6, [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    const ProcessGroupPtr even = new_group(group, {0, 2, 4});
    const ProcessGroupPtr odd = new_group(group, {5, 3, 1});  // an order of its own
    const ProcessGroupPtr mine = rank % 2 == 0 ? even : odd;
    EXPECT_EQ(rank % 2 == 0 ? odd : even, nullptr);
    EXPECT_EQ(mine->getRank(), rank % 2 == 0 ? rank / 2 : (5 - rank) / 2);
    Tensors tensors = {at::full({2}, rank, at::kLong)};
    mine->allreduce(tensors)->wait();
    EXPECT_EQ(tensors[0][0].item<int64_t>(), rank % 2 == 0 ? 6 : 9);
    const ProcessGroupPtr again = new_group(mine, {1, 2});
    if (again) again->barrier()->wait();
  });
}

}  // namespace
}  // namespace fsdp
