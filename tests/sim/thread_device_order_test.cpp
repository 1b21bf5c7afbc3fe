// What a collective of rank threads on npus waits for and what waits for it: streams, not the host;
// its memory, its futures and its errors. The two accesses of a collective without their wait.

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include "base/stream.h"
#include "mesh/work.h"
#include "sim/npu_ranks.h"
#include "support/messages.h"

namespace fsdp {
namespace {

using testing::contains;
using testing::Devices;
using testing::in_every_execution;
using testing::message_thrown_by;
using testing::run_npu_ranks;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr int kWorldSize = 3;

class ThreadDeviceOrder : public ::testing::TestWithParam<Devices>, testing::CleanSim {};

at::Tensor filled(const c10::Device& device, double value, int64_t numel = 1000) {
  return at::full({numel}, value, at::TensorOptions(at::kFloat).device(device));
}

// Promise: wait() lets the host go on and the current stream wait. The collective runs behind what
// its ranks' streams had when it was called, and beside what comes on them before wait().
TEST_P(ThreadDeviceOrder, StreamsWaitAndTheHostDoesNot) {
  std::barrier all(kWorldSize);
  sim::set_execution(sim::Execution::kLate);
  std::vector<sim::Launch> launches;
  std::unique_ptr<sim::Trace> trace;
  run_npu_ranks(kWorldSize, GetParam(), [&](const ProcessGroupPtr& group, const c10::Device& npu) {
    Tensors tensors = {filled(npu, 1)};
    const at::Tensor other = filled(npu, 1);
    // Its streams are known then, and no rank's start-up is in the trace.
    group->allreduce(tensors)->wait();
    all.arrive_and_wait();
    if (group->getRank() == 0) trace = std::make_unique<sim::Trace>();
    all.arrive_and_wait();
    {
      RECORD_USER_SCOPE("before");
      tensors[0].add_(1);
    }
    all.arrive_and_wait();
    WorkPtr work;
    {
      RECORD_USER_SCOPE("collective");
      work = group->allreduce(tensors);
    }
    all.arrive_and_wait();
    {
      RECORD_USER_SCOPE("meanwhile");
      other.add_(1);
    }
    all.arrive_and_wait();
    work->wait();
    {
      RECORD_USER_SCOPE("after");
      tensors[0].add_(1);
    }
    all.arrive_and_wait();
    if (group->getRank() == 0) launches = trace->launches();
    all.arrive_and_wait();
    EXPECT_EQ(tensors[0][0].item<float>(), kWorldSize * (kWorldSize + 1) + 1);
  });
  const auto at = [&](const std::string& place) {
    std::vector<size_t> found;
    for (size_t i = 0; i < launches.size(); ++i) {
      if (launches[i].place == place) found.push_back(i);
    }
    return found;
  };
  for (const sim::Launch& launch : launches) EXPECT_NE(launch.operation, "host waits");
  ASSERT_EQ(at("before").size(), kWorldSize);
  ASSERT_EQ(at("meanwhile").size(), kWorldSize);
  ASSERT_EQ(at("after").size(), kWorldSize);
  ASSERT_GE(at("collective").size(), kWorldSize);
  for (const size_t share : at("collective")) {
    EXPECT_FALSE(contains(launches[share].stream, "default")) << launches[share].operation;
    for (const size_t before : at("before")) EXPECT_TRUE(trace->is_ordered(before, share));
    for (const size_t beside : at("meanwhile")) {
      EXPECT_FALSE(trace->is_ordered(share, beside));
      EXPECT_FALSE(trace->is_ordered(beside, share));
    }
    for (const size_t after : at("after")) EXPECT_TRUE(trace->is_ordered(share, after));
  }
}

// Promise: wait() is about the current stream of the thread that calls it, also a second time.
TEST_P(ThreadDeviceOrder, EachStreamWaitsForItself) {
  in_every_execution([] {
    run_npu_ranks(kWorldSize, GetParam(), [&](const auto& group, const c10::Device& npu) {
      const Stream side = new_stream(npu, /*high_priority=*/false);
      Tensors tensors = {filled(npu, group->getRank() + 1)};
      const WorkPtr work = group->allreduce(tensors);
      at::Tensor on_side;
      {
        const StreamGuard guard(side);
        work->wait();
        on_side = tensors[0] * 2;
      }
      work->wait();
      const at::Tensor on_default = tensors[0] * 3;
      current_stream(npu).wait(side);
      EXPECT_EQ((on_side + on_default)[5].template item<float>(), 5 * 6);
    });
  });
}

// Promise: the memory of a collective that nobody waits for is not given out before it is over,
// whether its ranks let go of it before or after the others have come.
TEST_P(ThreadDeviceOrder, DroppedWorkKeepsItsMemory) {
  for (const bool early : {true, false}) {
    in_every_execution([&] {
      std::barrier all(kWorldSize);
      run_npu_ranks(kWorldSize, GetParam(), [&](const auto& group, const c10::Device& npu) {
        const int rank = group->getRank();
        at::Tensor output = filled(npu, -1, 1000 * kWorldSize);
        for (int turn = 0; turn < kWorldSize; ++turn) {
          if (early && turn == rank) {
            at::Tensor input = filled(npu, rank);
            (void)group->_allgather_base(output, input);
          }
          if (early) all.arrive_and_wait();
        }
        if (!early) {
          at::Tensor input = filled(npu, rank);
          const WorkPtr work = group->_allgather_base(output, input);
          all.arrive_and_wait();
        }
        Tensors others;
        for (int i = 0; i < 5; ++i) others.push_back(filled(npu, 100 + i));
        Tensors next = {filled(npu, 1)};
        group->allreduce(next)->wait();  // comes behind the one before on the same streams
        for (int r = 0; r < kWorldSize; ++r) {
          const at::Tensor part = output.narrow(0, 1000 * r, 1000);
          EXPECT_TRUE(part.eq(r).all().template item<bool>()) << "from rank " << r;
        }
      });
    });
  }
}

// Promise: the callbacks of a future run behind the collective on streams of their own, on the
// device of the rank; so does what comes on a stream after the future's wait().
TEST_P(ThreadDeviceOrder, FuturesCarryTheirPlaceOnTheDevice) {
  in_every_execution([] {
    run_npu_ranks(kWorldSize, GetParam(), [&](const auto& group, const c10::Device& npu) {
      const Stream caller = current_stream(npu);
      Tensors tensors = {filled(npu, group->getRank() + 1)};
      at::Tensor kept = tensors[0];
      c10::intrusive_ptr<c10::ivalue::Future> child;
      {
        const WorkPtr work = group->allreduce(tensors);
        child = work->getFuture()->then(
            [&](c10::ivalue::Future& future) {
              EXPECT_FALSE(current_stream(npu) == caller);
              EXPECT_EQ(with_index(c10::Device(npu.type())), npu);
              return c10::IValue(future.value().toTensorVector()[0] * 2);
            },
            c10::TensorType::get());
      }
      child->wait();
      const at::Tensor found = child->value().toTensor() + kept;
      EXPECT_EQ(found[7].template item<float>(), 3 * 6);
    });
  });
}

// Promise: a send has no result, and still its future says when the sent memory is free.
TEST_P(ThreadDeviceOrder, TheFutureOfASend) {
  in_every_execution([] {
    run_npu_ranks(2, GetParam(), [&](const auto& group, const c10::Device& npu) {
      Tensors tensors = {filled(npu, group->getRank() + 5)};
      if (group->getRank() == 1) {
        group->recv(tensors, 0, 0)->wait();
        EXPECT_TRUE(tensors[0].eq(5).all().template item<bool>());
        return;
      }
      auto done =
          group->send(tensors, 1, 0)
              ->getFuture()
              ->then([&](c10::ivalue::Future&) { return c10::IValue(tensors[0].fill_(-1)); },
                     c10::TensorType::get());
      done->wait();
      EXPECT_TRUE(tensors[0].eq(-1).all().template item<bool>());
    });
  });
}

// Promise: what isCompleted() says of a collective on a device is what the device has done.
TEST_P(ThreadDeviceOrder, CompletedMeansOnTheDevice) {
  sim::set_execution(sim::Execution::kLate);
  std::barrier all(kWorldSize);
  run_npu_ranks(kWorldSize, GetParam(), [&](const auto& group, const c10::Device& npu) {
    Tensors tensors = {filled(npu, 2)};
    const WorkPtr work = group->allreduce(tensors);
    all.arrive_and_wait();
    sim::Trace trace;
    while (!work->isCompleted()) std::this_thread::yield();
    const auto launches = trace.launches();
    // The host has looked at the device, and need not wait any more.
    EXPECT_TRUE(std::any_of(launches.begin(), launches.end(), [](const sim::Launch& launch) {
      return launch.operation == "host waits";
    }));
    EXPECT_TRUE(work->isSuccess());
    work->synchronize();
    EXPECT_EQ(tensors[0][3].template item<float>(), 2 * kWorldSize);
  });
}

// Promise: ranks that disagree all learn it, by name and soon, and can go on with their tensors.
TEST_P(ThreadDeviceOrder, MismatchesAreNamedOnEveryRank) {
  struct Case {
    std::function<at::Tensor(const c10::Device&)> of_rank_1;
    std::string part;
  };
  const std::vector<Case> cases = {
      {[](const c10::Device&) { return at::ones({1000}); },
       "rank 1 called allreduce with 1000 elements of Float, SUM, "},
      {[](const c10::Device& npu) { return filled(npu, 1, 1001); },
       "rank 1 called allreduce with 1001 elements of Float, SUM, on npu"},
      {[](const c10::Device& npu) { return filled(npu, 1).to(at::kHalf); },
       "rank 1 called allreduce with 1000 elements of Half, SUM, on npu"},
  };
  for (const Case& mismatch : cases) {
    const auto start = std::chrono::steady_clock::now();
    std::atomic<int> num_thrown = 0;
    run_npu_ranks(kWorldSize, GetParam(), [&](const auto& group, const c10::Device& npu) {
      Tensors tensors = {group->getRank() == 1 ? mismatch.of_rank_1(npu) : filled(npu, 1)};
      const std::string message = message_thrown_by([&] { group->allreduce(tensors)->wait(); });
      EXPECT_TRUE(contains(message, mismatch.part.substr(0, mismatch.part.size() - 2))) << message;
      EXPECT_TRUE(contains(message, "on npu")) << message;
      EXPECT_TRUE(contains(message, "Every rank must make the same calls")) << message;
      EXPECT_EQ(tensors[0].add_(1)[0].template item<float>(), 2);
      ++num_thrown;
    });
    EXPECT_EQ(num_thrown, kWorldSize);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  }
}

// Promise: a call whose tensors are on several devices is refused before anything is done.
TEST_P(ThreadDeviceOrder, OneCallIsOnOneDevice) {
  run_npu_ranks(1, GetParam(), [&](const ProcessGroupPtr& group, const c10::Device& npu) {
    at::Tensor input = filled(npu, 1), on_host = at::ones({1000});
    at::Tensor elsewhere = filled(sim::device(1), 1);
    for (at::Tensor& output : Tensors{on_host, elsewhere}) {
      const auto call = [&] { (void)group->_allgather_base(output, input); };
      EXPECT_THROW(call(), ConfigError);
      EXPECT_TRUE(contains(message_thrown_by(call),
                           c10::str("the tensors of one call must be on one device, found ", npu,
                                    " and ", output.device())));
    }
    at::Tensor output = filled(npu, 0);
    group->_allgather_base(output, input)->wait();
    EXPECT_EQ(output[0].item<float>(), 1);
  });
}

// Promise: a rank that throws, leaves or does not come ends the wait of the others, with its name.
TEST_P(ThreadDeviceOrder, NobodyWaitsForARankThatIsGone) {
  const auto start = std::chrono::steady_clock::now();
  std::atomic<int> num_freed = 0;
  std::barrier all(kWorldSize);
  const auto others_fail = [&](const ProcessGroupPtr& group, const c10::Device& npu,
                               const std::string& part) {
    Tensors tensors = {filled(npu, 1)};
    const WorkPtr work = group->allreduce(tensors);
    all.arrive_and_wait();
    const std::string message = message_thrown_by([&] { work->wait(); });
    EXPECT_TRUE(contains(message, part)) << message;
    EXPECT_TRUE(work->isCompleted());
    EXPECT_FALSE(work->isSuccess());
    EXPECT_TRUE(work->getFuture()->hasError());
    EXPECT_EQ(tensors[0].add_(1)[0].item<float>(), 2);
    ++num_freed;
  };
  EXPECT_THROW(run_npu_ranks(kWorldSize, GetParam(),
                             [&](const ProcessGroupPtr& group, const c10::Device& npu) {
                               if (group->getRank() == 1) {
                                 all.arrive_and_wait();
                                 throw std::out_of_range("beyond");
                               }
                               others_fail(group, npu, "rank 1 failed: beyond");
                             }),
               std::out_of_range);
  run_npu_ranks(kWorldSize, GetParam(), [&](const ProcessGroupPtr& group, const c10::Device& npu) {
    if (group->getRank() == 1) return all.arrive_and_wait();
    others_fail(group, npu, "rank 1 has left the job");
  });
  std::barrier done(kWorldSize);
  run_npu_ranks(kWorldSize, GetParam(), [&](const ProcessGroupPtr& group, const c10::Device& npu) {
    group->getDefaultBackend()->setTimeout(std::chrono::milliseconds(100));
    if (group->getRank() == 1) {
      all.arrive_and_wait();
    } else {
      others_fail(group, npu, "ranks [1] did not join within 100 ms");
    }
    done.arrive_and_wait();
  });
  EXPECT_EQ(num_freed, 3 * (kWorldSize - 1));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

// Promise: when the share of one rank fails on the device, all ranks learn whose it was, and the
// memory of the shares that did not fail is kept until they are done.
TEST_P(ThreadDeviceOrder, AShareThatFails) {
  std::barrier all(kWorldSize);
  run_npu_ranks(kWorldSize, GetParam(), [&](const ProcessGroupPtr& group, const c10::Device& npu) {
    const int rank = group->getRank();
    const Stream side = new_stream(npu, /*high_priority=*/false);
    {
      Tensors inputs = {filled(npu, rank)};
      TensorLists outputs;
      if (rank == 0) outputs = {{filled(npu, -1), filled(npu, -1), filled(npu, -1)}};
      if (rank == 1) {
        side.wait(current_stream(npu));
        const StreamGuard guard(side);
        inputs[0].mul_(2);  // which nothing waits for
      }
      const WorkPtr work = group->gather(outputs, inputs);
      const std::string message = message_thrown_by([&] { work->wait(); });
      EXPECT_TRUE(contains(message,
                           "gather with 1000 elements of Float, root 0, on npu "
                           "(collective 0), the part of rank 1: sim: a race"))
          << message;
      all.arrive_and_wait();
      if (rank == 1) current_stream(npu).wait(side);
    }
    for (int i = 0; i < 5; ++i) (void)filled(npu, 100);
  });
  EXPECT_EQ(sim::take_races().size(), 1U);
}

// An access of a collective that something else at rank 1 races with, in a broadcast from `root`.
struct Control {
  int root;
  std::string first, second;
  // What rank 1 does before it calls the collective, and before it waits; returns what it found.
  std::function<void(bool waits, const at::Tensor& tensor)> before;
  std::function<at::Tensor(bool waits, const at::Tensor& tensor, c10d::Work& work)> meanwhile;
};

// Arrives at the end of a scope, also if that throws.
struct Arrival {
  ~Arrival() { (void)barrier.arrive(); }
  std::barrier<>& barrier;
};

class CollectiveControl : public ThreadDeviceOrder {
 protected:
  // What the rank that receives found.
  static at::Tensor run(const Control& control, bool waits, sim::Execution execution) {
    std::vector<at::Tensor> found(2);
    std::barrier both(2);
    sim::set_execution(execution);
    run_npu_ranks(2, GetParam(), [&](const ProcessGroupPtr& group, const c10::Device& npu) {
      const int rank = group->getRank();
      Tensors tensors = {filled(npu, rank + 1)};
      c10d::BroadcastOptions options;
      options.rootRank = control.root;
      if (rank == 1) control.before(waits, tensors[0]);
      const WorkPtr work = group->broadcast(tensors, options);
      both.arrive_and_wait();  // all have called it: it is on its streams
      if (rank == 1) {
        const Arrival arrival{both};
        found[rank] = control.meanwhile(waits, tensors[0], *work);
      } else {
        both.arrive_and_wait();  // whoever waits also lets late work run that the other waits for
        found[rank] = tensors[0];
      }
      work->wait();
      found[rank] = found[rank].cpu();
    });
    sim::set_execution(sim::Execution::kEager);
    return found[1 - control.root];
  }

  static void expect_race(const Control& control) {
    const at::Tensor expected = run(control, /*waits=*/true, sim::Execution::kEager);
    in_every_execution(
        [&] { EXPECT_TRUE(at::equal(run(control, /*waits=*/true, sim::execution()), expected)); });
    std::string message;
    try {
      (void)run(control, /*waits=*/false, sim::Execution::kEager);
    } catch (const c10::Error& error) {  // the race's own, or of ranks that met it in a collective
      message = error.what_without_backtrace();
    }
    const auto races = sim::take_races();
    ASSERT_EQ(races.size(), 1U);
    for (const std::string& text : {message, races[0].describe()}) {
      EXPECT_TRUE(contains(text, "sim: a race for 4000 bytes.")) << text;
      EXPECT_TRUE(contains(text, "first:  " + control.first)) << text;
      EXPECT_TRUE(contains(text, "second: " + control.second)) << text;
    }
    sim::set_on_race(sim::OnRace::kIgnore);
    const at::Tensor wrong = run(control, /*waits=*/false, sim::Execution::kLateSideStreams);
    EXPECT_FALSE(at::equal(wrong, expected)) << wrong[0];
  }
};

// Collective in: the input is written on another stream, which the collective does not wait for.
TEST_P(CollectiveControl, InputWrittenBefore) {
  expect_race({.root = 1,
               .first = "aten::mul (writes) on npu:",
               .second = "copy (reads) on npu:",
               .before =
                   [](bool waits, const at::Tensor& tensor) {
                     const c10::Device npu = tensor.device();
                     const Stream side = new_stream(npu, /*high_priority=*/false);
                     side.wait(current_stream(npu));
                     {
                       const StreamGuard on_side(side);
                       tensor.mul_(10);
                     }
                     if (waits) current_stream(npu).wait(side);
                   },
               .meanwhile = [](bool, const at::Tensor& tensor, c10d::Work&) { return tensor; }});
}

// Collective in: the input is written while the collective reads it.
TEST_P(CollectiveControl, InputWrittenMeanwhile) {
  expect_race({.root = 1,
               .first = "copy (reads) on npu:",
               .second = "aten::mul (writes) on npu:",
               .before = [](bool, const at::Tensor&) {},
               .meanwhile =
                   [](bool waits, const at::Tensor& tensor, c10d::Work& work) {
                     if (waits) work.wait();
                     return tensor.mul_(10);
                   }});
}

// Collective out: the output is read before wait().
TEST_P(CollectiveControl, OutputReadBefore) {
  expect_race({.root = 0,
               .first = "copy (writes) on npu:",
               .second = "aten::add (reads) on npu:",
               .before = [](bool, const at::Tensor&) {},
               .meanwhile =
                   [](bool waits, const at::Tensor& tensor, c10d::Work& work) {
                     if (waits) work.wait();
                     return tensor + 1;
                   }});
}

std::string name_of(const ::testing::TestParamInfo<Devices>& info) {
  return testing::name_of(info.param);
}
INSTANTIATE_TEST_SUITE_P(Npu, ThreadDeviceOrder,
                         ::testing::Values(Devices::kShared, Devices::kOneEach), name_of);
INSTANTIATE_TEST_SUITE_P(Npu, CollectiveControl,
                         ::testing::Values(Devices::kShared, Devices::kOneEach), name_of);

}  // namespace
}  // namespace fsdp
