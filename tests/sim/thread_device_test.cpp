// Collectives of rank threads on simulated npus: the bits of those on the host, in every order of
// execution, and the race detector sees nothing.

#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "sim/npu_ranks.h"
#include "support/reduce_ops.h"

namespace fsdp {
namespace {

using c10d::ReduceOp;
using testing::Devices;
using testing::reduce_op;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// One rank of a run, on the host or on a device, and the results it kept.
struct Rank {
  ProcessGroupPtr group;
  c10::Device device;
  int rank;
  int n;
  Tensors found;

  // Values whose sums need rounding, with infinities, NaNs and zeros of both signs among them. The
  // last thing that is done to them is on the current stream.
  [[nodiscard]] at::Tensor input(int64_t numel, at::ScalarType dtype, int salt = 0) const {
    const at::Tensor index = at::arange(numel, at::kDouble) + 1;
    at::Tensor wave = at::sin(index * (rank + 1 + salt) * 0.7) * 3;
    if (at::isIntegralType(dtype, /*includeBool=*/false)) wave = at::abs(wave * 3);
    if (dtype == at::kBool) wave = wave.gt(0);
    if (at::isFloatingType(dtype) && numel > 8 && c10::elementSize(dtype) > 1) {
      wave[3] = rank == 1 ? std::numeric_limits<double>::quiet_NaN() : 1;
      wave[5] = rank == 0 ? std::numeric_limits<double>::infinity() : -1;
      wave[7] = rank % 2 == 0 ? 0.0 : -0.0;
    }
    if (at::isComplexType(dtype)) wave = at::complex(wave, wave.cos());
    return wave.to(dtype).to(device).clone();
  }
  [[nodiscard]] at::Tensor empty(int64_t numel, at::ScalarType dtype) const {
    return at::full({numel}, 1, at::TensorOptions(dtype).device(device));
  }

  // Waits, keeps the results, and uses the tensors for something else at once.
  void keep(const c10::intrusive_ptr<c10d::Work>& work, const Tensors& outputs,
            const Tensors& inputs = {}) {
    work->wait();
    for (const at::Tensor& output : outputs) found.push_back(output.clone());
    for (const at::Tensor& output : outputs) output.zero_();
    for (const at::Tensor& input : inputs) input.zero_();
  }
};

std::vector<ReduceOp::RedOpType> reductions_of(at::ScalarType dtype) {
  std::vector<ReduceOp::RedOpType> ops = {ReduceOp::SUM};
  if (dtype != at::kBool) ops.push_back(ReduceOp::AVG);
  const bool is_integer = at::isIntegralType(dtype, /*includeBool=*/true);
  if (!is_integer) ops.push_back(ReduceOp::PREMUL_SUM);
  if (!at::isComplexType(dtype)) {
    ops.insert(ops.end(), {ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX});
  }
  if (is_integer) ops.insert(ops.end(), {ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR});
  return ops;
}

void reduce_in_all_forms(Rank& me, at::ScalarType dtype, ReduceOp::RedOpType op, int64_t numel) {
  c10d::AllreduceOptions all;
  all.reduceOp = reduce_op(op, me.rank);
  Tensors tensors = {me.input(numel * me.n, dtype)};
  me.keep(me.group->allreduce(tensors, all), tensors);

  c10d::ReduceScatterOptions scatter;
  scatter.reduceOp = reduce_op(op, me.rank);
  at::Tensor input = me.input(numel * me.n, dtype), output = me.empty(numel, dtype);
  me.keep(me.group->_reduce_scatter_base(output, input, scatter), {output}, {input});

  for (const int root : {0, me.n - 1}) {
    c10d::ReduceOptions to_root;
    to_root.reduceOp = reduce_op(op, me.rank);
    to_root.rootRank = root;
    tensors = {me.input(numel * me.n, dtype)};
    me.keep(me.group->reduce(tensors, to_root), tensors);
  }
}

void reductions(Rank& me) {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar, at::kShort,
        at::kInt, at::kLong, at::kBool, at::kComplexFloat, at::kComplexDouble}) {
    for (const auto op : reductions_of(dtype)) {
      for (const int64_t numel : {0, 1, 13}) reduce_in_all_forms(me, dtype, op, numel);
    }
  }
}

// So large that each rank reduces a part.
void large_reductions(Rank& me) {
  for (const auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PREMUL_SUM, ReduceOp::MAX}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) reduce_in_all_forms(me, dtype, op, 17011);
  }
}

// A reduce-scatter into its own slice of the input, and into any other part of it.
void reductions_in_place(Rank& me) {
  const int64_t numel = 5003;
  for (const int64_t begin :
       {me.rank * numel, int64_t{0}, (me.n - 1) * numel, numel * me.n / 2 - numel / 2}) {
    at::Tensor input = me.input(numel * me.n, at::kFloat);
    at::Tensor output = input.narrow(0, begin, numel);
    me.keep(me.group->_reduce_scatter_base(output, input), {output}, {input});
  }
}

void move_from_and_to_roots(Rank& me, at::ScalarType dtype, int64_t numel) {
  for (int root = 0; root < me.n; ++root) {
    c10d::BroadcastOptions broadcast;
    broadcast.rootRank = root;
    Tensors tensors = {me.input(numel, dtype)};
    me.keep(me.group->broadcast(tensors, broadcast), tensors);

    c10d::GatherOptions gather;
    gather.rootRank = root;
    Tensors inputs = {me.input(numel, dtype)};
    TensorLists lists(me.rank == root ? 1 : 0);
    for (int r = 0; me.rank == root && r < me.n; ++r) lists[0].push_back(me.empty(numel, dtype));
    me.keep(me.group->gather(lists, inputs, gather), lists.empty() ? Tensors() : lists[0], inputs);

    c10d::ScatterOptions scatter;
    scatter.rootRank = root;
    Tensors outputs = {me.empty(numel, dtype)};
    for (at::Tensor& list : lists.empty() ? inputs : lists[0]) list = me.input(numel, dtype, root);
    me.keep(me.group->scatter(outputs, lists, scatter), outputs,
            lists.empty() ? Tensors() : lists[0]);
  }
}

void moves(Rank& me) {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar, at::kShort,
        at::kInt, at::kLong, at::kBool, at::kComplexFloat, at::kFloat8_e4m3fn}) {
    for (const int64_t numel : {0, 1, 37}) {
      move_from_and_to_roots(me, dtype, numel);
      at::Tensor output = me.empty(numel * me.n, dtype), input = me.input(numel, dtype);
      me.keep(me.group->_allgather_base(output, input), {output}, {input});
      output = me.empty(numel * me.n, dtype);
      at::Tensor slice = output.narrow(0, numel * me.rank, numel);
      slice.copy_(me.input(numel, dtype));
      me.keep(me.group->_allgather_base(output, slice), {output});
    }
  }
}

// Coalesced forms of mixed dtypes and sizes, one of them empty; lists whose lengths differ by rank.
void lists(Rank& me) {
  const int64_t n = me.n;
  const auto three = [&](int64_t copies) {
    return Tensors{me.input(7 * copies, at::kFloat), me.input(3 * copies, at::kLong),
                   me.input(0, at::kFloat)};
  };
  Tensors inputs = three(n), outputs = three(n * n), shards = three(1);
  me.keep(me.group->allgather_into_tensor_coalesced(outputs, inputs), outputs, inputs);
  inputs = three(n);
  me.keep(me.group->reduce_scatter_tensor_coalesced(shards, inputs), shards, inputs);
  inputs = three(n);
  me.keep(me.group->allreduce_coalesced(inputs), inputs);

  TensorLists gathered(2);
  Tensors two = {me.input(5, at::kFloat), me.input(2, at::kInt)};
  for (int r = 0; r < n; ++r) gathered[0].push_back(me.empty(5, at::kFloat));
  for (int r = 0; r < n; ++r) gathered[1].push_back(me.empty(2, at::kInt));
  const auto work = me.group->allgather_coalesced(gathered, two);
  me.keep(work, gathered[0], two);
  me.keep(work, gathered[1]);

  TensorLists uneven(1), to_scatter(1);
  Tensors mine = {me.input(me.rank, at::kFloat)}, shard = {me.empty(me.rank, at::kFloat)};
  for (int r = 0; r < n; ++r) uneven[0].push_back(me.empty(r, at::kFloat));
  me.keep(me.group->allgather(uneven, mine), uneven[0], mine);
  for (int r = 0; r < n; ++r) to_scatter[0].push_back(me.input(r, at::kFloat, r));
  me.keep(me.group->reduce_scatter(shard, to_scatter), shard, to_scatter[0]);
}

void all_to_all(Rank& me) {
  std::vector<int64_t> none, splits;
  at::Tensor input = me.input(3 * me.n, at::kLong), output = me.empty(3 * me.n, at::kLong);
  me.keep(me.group->alltoall_base(output, input, none, none), {output}, {input});
  Tensors sent, received;
  int64_t rows = 0;
  for (int peer = 0; peer < me.n; ++peer) {  // rank s sends s + d rows to rank d
    splits.push_back(me.rank + peer);
    rows += me.rank + peer;
    sent.push_back(me.input(2 * (me.rank + peer), at::kBFloat16, peer));
    received.push_back(me.empty(2 * (me.rank + peer), at::kBFloat16));
  }
  at::Tensor flat_in = at::cat(sent).view({rows, 2});
  at::Tensor flat_out = me.empty(2 * rows, at::kBFloat16).view({rows, 2});
  me.keep(me.group->alltoall_base(flat_out, flat_in, splits, splits), {flat_out}, {flat_in});
  me.keep(me.group->alltoall(received, sent), received, sent);
}

void send_and_receive(Rank& me) {
  if (me.n == 1) return;
  const int next = (me.rank + 1) % me.n, previous = (me.rank + me.n - 1) % me.n;
  std::vector<c10::intrusive_ptr<c10d::Work>> sends, receives;
  TensorLists sent, received;
  for (int i = 0; i < 4; ++i) {
    sent.push_back({me.input(5 * i, at::kFloat, i)});
    received.push_back({me.empty(5 * i, at::kFloat)});
  }
  for (int i = 0; i < 4; ++i) sends.push_back(me.group->send(sent[i], next, /*tag=*/i % 2));
  for (int i = 0; i < 4; ++i) receives.push_back(me.group->recv(received[i], previous, i % 2));
  for (int i = 4; i-- > 0;) me.keep(receives[i], received[i]);
  for (int i = 0; i < 4; ++i) me.keep(sends[i], {}, sent[i]);
}

// Sub-groups beside each other, one in an order of its own, with collectives of several in flight.
void sub_groups(Rank& me) {
  std::vector<int> even, odd;
  for (int r = 0; r < me.n; ++r) (r % 2 == 0 ? even : odd).push_back(r);
  odd = std::vector<int>(odd.rbegin(), odd.rend());
  const ProcessGroupPtr evens = new_group(me.group, even);
  const ProcessGroupPtr odds = odd.empty() ? nullptr : new_group(me.group, odd);
  const ProcessGroupPtr mine = me.rank % 2 == 0 ? evens : odds;
  Tensors a = {me.input(11, at::kFloat)}, b = {me.input(11, at::kFloat, 1)};
  for (int round = 0; round < 3; ++round) {
    const auto of_half = mine->allreduce(a);
    const auto of_all = me.group->allreduce(b);
    me.group->barrier()->wait();
    of_all->wait();
    of_half->wait();
    const at::Tensor sum = a[0] + b[0];
    a[0].copy_(b[0].div(me.n));
    b[0].copy_(sum.div(me.n));
  }
  me.found.insert(me.found.end(), {a[0], b[0]});
}

struct Part {
  std::string name;
  void (*run)(Rank&);
};

std::vector<Part> parts() {
  return {{"Reductions", &reductions},
          {"LargeReductions", &large_reductions},
          {"ReductionsInPlace", &reductions_in_place},
          {"Moves", &moves},
          {"Lists", &lists},
          {"AllToAll", &all_to_all},
          {"SendAndReceive", &send_and_receive},
          {"SubGroups", &sub_groups}};
}

// What each rank found, on the host if there are no devices.
TensorLists run(const Part& part, int world_size, std::optional<Devices> devices) {
  TensorLists found(world_size);
  testing::run_ranks_on(devices, world_size, [&](const auto& group, const auto& device) {
    const int rank = group->getRank();
    Rank me{group, device, rank, world_size, {}};
    part.run(me);
    for (const at::Tensor& tensor : me.found) found[rank].push_back(tensor.cpu());
  });
  return found;
}

// Which NaN it is may differ.
bool same_bits(at::Tensor a, at::Tensor b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (a.is_complex()) return same_bits(at::view_as_real(a), at::view_as_real(b));
  if (a.is_floating_point() && a.element_size() > 1) {
    if (!at::equal(at::isnan(a), at::isnan(b))) return false;
    a = at::where(at::isnan(a), at::zeros_like(a), a);
    b = at::where(at::isnan(b), at::zeros_like(b), b);
  }
  return at::equal(a.reshape({-1}).view(at::kByte), b.reshape({-1}).view(at::kByte));
}

void expect_same(const TensorLists& found, const TensorLists& expected) {
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    ASSERT_EQ(found[rank].size(), expected[rank].size());
    for (size_t i = 0; i < expected[rank].size(); ++i) {
      ASSERT_TRUE(same_bits(found[rank][i], expected[rank][i]))
          << "result " << i << " of rank " << rank << ":\n"
          << found[rank][i] << "\nexpected\n"
          << expected[rank][i];
    }
  }
}

class ThreadDevice : public ::testing::TestWithParam<std::tuple<Part, int, Devices>>,
                     testing::CleanSim {};

TEST_P(ThreadDevice, GivesTheBitsOfTheHost) {
  const auto& [part, world_size, devices] = GetParam();
  const TensorLists expected = run(part, world_size, std::nullopt);
  testing::in_every_execution([&, &part = part, world_size = world_size, devices = devices] {
    expect_same(run(part, world_size, devices), expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Npu, ThreadDevice,
                         ::testing::Combine(::testing::ValuesIn(parts()),
                                            ::testing::Values(1, 2, 3, 8),
                                            ::testing::Values(Devices::kShared, Devices::kOneEach)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_" +
                                  std::to_string(std::get<1>(info.param)) + "_" +
                                  testing::name_of(std::get<2>(info.param));
                         });

}  // namespace
}  // namespace fsdp
