// Each kind of access without its wait: the race detector names both sides, and late execution
// computes something else. With the wait neither happens.

#include <functional>
#include <string>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include "base/stream.h"
#include "fsdp/sim.h"

namespace fsdp {
namespace {

// What each kind of hazard is tried with: `work(wait)` does something on two streams, and returns
// what it found. `wait(later, earlier)` lets a stream wait for another, or does not.
using Wait = std::function<void(const Stream& later, const Stream& earlier)>;
using Work = std::function<at::Tensor(const Wait& wait)>;

class Races : public ::testing::Test {
 protected:
  void SetUp() override {
    sim::enable();
    sim::set_on_race(sim::OnRace::kThrow);
    sim::synchronize();
    sim::empty_cache();
  }
  void TearDown() override {
    sim::set_execution(sim::Execution::kEager);
    sim::set_on_race(sim::OnRace::kThrow);
    (void)sim::take_races();
  }

  static at::Tensor run(const Work& work, const Wait& wait, sim::Execution execution,
                        sim::OnRace on_race) {
    sim::set_execution(execution);
    sim::set_on_race(on_race);
    const at::Tensor found = work(wait);
    sim::set_execution(sim::Execution::kEager);
    return found;
  }

  // `wrong_in`: the execution that shows the missing wait in numbers.
  static void expect_race(const Work& work, sim::Execution wrong_in, const std::string& first,
                          const std::string& second) {
    const Wait with = [](const Stream& later, const Stream& earlier) { later.wait(earlier); };
    const Wait without = [](const Stream&, const Stream&) {};
    const at::Tensor expected = run(work, with, sim::Execution::kEager, sim::OnRace::kThrow);
    for (const auto execution : {sim::Execution::kLateSideStreams,
                                 sim::Execution::kLateDefaultStreams, sim::Execution::kLate}) {
      EXPECT_TRUE(at::equal(run(work, with, execution, sim::OnRace::kThrow), expected));
    }
    EXPECT_TRUE(sim::take_races().empty());

    EXPECT_THROW((void)run(work, without, sim::Execution::kEager, sim::OnRace::kThrow),
                 sim::RaceError);
    const auto races = sim::take_races();
    ASSERT_EQ(races.size(), 1U);
    const std::string text = races[0].describe();
    EXPECT_NE(text.find("first:  " + first), std::string::npos) << text;
    EXPECT_NE(text.find("second: " + second), std::string::npos) << text;

    const at::Tensor wrong = run(work, without, wrong_in, sim::OnRace::kIgnore);
    EXPECT_FALSE(at::equal(wrong, expected)) << wrong;
  }

  const c10::Device device_ = c10::Device(c10::DeviceType::PrivateUse1, 0);
  at::TensorOptions options() const { return at::TensorOptions(at::kFloat).device(device_); }
};

TEST_F(Races, KernelRead) {
  const Stream side = new_stream(device_, false), compute = current_stream(device_);
  expect_race(
      [&](const Wait& wait) {
        const at::Tensor x = at::ones({4}, options());
        side.wait(compute);
        {
          const StreamGuard guard(side);
          x.mul_(2);
        }
        wait(compute, side);
        return (x + 1).cpu();
      },
      sim::Execution::kLateSideStreams, "aten::mul (writes) on npu:0 stream",
      "aten::add (reads) on npu:0 default stream");
}

TEST_F(Races, KernelWrite) {
  const Stream side = new_stream(device_, false), compute = current_stream(device_);
  expect_race(
      [&](const Wait& wait) {
        const at::Tensor x = at::ones({4}, options());
        side.wait(compute);
        at::Tensor y;
        {
          const StreamGuard guard(side);
          y = x + 1;
        }
        wait(compute, side);
        x.zero_();  // while it is read
        compute.wait(side);
        return y.cpu();
      },
      sim::Execution::kLateSideStreams, "aten::add (reads) on npu:0 stream",
      "aten::zero_ (writes) on npu:0 default stream");
}

TEST_F(Races, RawCopy) {
  const Stream side = new_stream(device_, false), compute = current_stream(device_);
  expect_race(
      [&](const Wait& wait) {
        const at::Tensor x = at::ones({4}, options()), y = at::zeros({4}, options());
        side.wait(compute);
        {
          const StreamGuard guard(side);
          c10::GetAllocator(device_.type())
              ->copy_data(y.mutable_data_ptr(), x.data_ptr(), x.nbytes());
        }
        wait(compute, side);
        return (y * 3).cpu();
      },
      sim::Execution::kLateSideStreams, "raw copy (writes) on npu:0 stream",
      "aten::mul (reads) on npu:0 default stream");
}

// Memory of the side stream is freed while the compute stream has yet to read it.
TEST_F(Races, FreeAndReuse) {
  const Stream side = new_stream(device_, false), compute = current_stream(device_);
  expect_race(
      [&](const Wait& wait) {
        at::Tensor y;
        {
          at::Tensor x;
          {
            const StreamGuard guard(side);
            x = at::ones({4}, options());
          }
          compute.wait(side);
          y = x + 1;
        }
        wait(side, compute);
        {
          const StreamGuard guard(side);
          const at::Tensor other = at::empty({1000}, options());
        }
        return y.cpu();
      },
      sim::Execution::kLateDefaultStreams, "aten::add (reads) on npu:0 default stream",
      "allocation, which may be given this freed memory (writes) on npu:0 stream");
}

// The same where the block is kept back by record_stream instead of a wait.
TEST_F(Races, RecordStreamKeepsTheBlock) {
  const Stream side = new_stream(device_, false), compute = current_stream(device_);
  for (const auto execution : {sim::Execution::kEager, sim::Execution::kLateSideStreams,
                               sim::Execution::kLateDefaultStreams, sim::Execution::kLate}) {
    sim::set_execution(execution);
    at::Tensor y;
    {
      at::Tensor x;
      {
        const StreamGuard guard(side);
        x = at::ones({4}, options());
      }
      compute.wait(side);
      x.record_stream(compute.raw());
      y = x + 1;
    }
    {
      const StreamGuard guard(side);
      at::empty({4}, options()).fill_(7);
    }
    EXPECT_TRUE(at::equal(y.cpu(), at::full({4}, 2.0F)));
  }
}

// The host reads pinned memory that a copy has yet to fill.
TEST_F(Races, HostRead) {
  const Stream compute = current_stream(device_);
  const auto work = [&](const Wait& wait) {
    const at::Tensor x = at::ones({4}, options());
    const at::Tensor host = at::zeros({4}, at::TensorOptions().pinned_memory(true));
    host.copy_(x, /*non_blocking=*/true);
    wait(compute, compute);
    at::Tensor found = host + 1;
    (void)at::empty({1}, options());  // a race of the host's throws here
    return found;
  };
  const Wait with = [](const Stream& stream, const Stream&) { stream.record().synchronize(); };
  const Wait without = [](const Stream&, const Stream&) {};
  for (const auto execution : {sim::Execution::kEager, sim::Execution::kLate}) {
    EXPECT_TRUE(at::equal(run(work, with, execution, sim::OnRace::kThrow), at::full({4}, 2.0F)));
  }
  EXPECT_THROW((void)run(work, without, sim::Execution::kEager, sim::OnRace::kThrow),
               sim::RaceError);
  const auto races = sim::take_races();
  ASSERT_EQ(races.size(), 1U);
  EXPECT_NE(races[0].describe().find("first:  copy to host (writes)"), std::string::npos);
  EXPECT_NE(races[0].describe().find("second: aten::add (reads) on host"), std::string::npos);
  EXPECT_FALSE(at::equal(run(work, without, sim::Execution::kLate, sim::OnRace::kIgnore),
                         at::full({4}, 2.0F)));
}

// The host writes pinned memory that a copy has yet to read.
TEST_F(Races, HostWrite) {
  const Stream compute = current_stream(device_);
  const auto work = [&](bool wait) {
    const at::Tensor host = at::ones({4}, at::TensorOptions().pinned_memory(true));
    const at::Tensor x = at::zeros({4}, options());
    x.copy_(host, /*non_blocking=*/true);
    if (wait) compute.record().synchronize();
    host.zero_();
    return x.cpu();
  };
  sim::set_execution(sim::Execution::kLate);
  EXPECT_TRUE(at::equal(work(true), at::ones({4})));
  EXPECT_THROW((void)work(false), sim::RaceError);
  sim::set_on_race(sim::OnRace::kIgnore);
  EXPECT_FALSE(at::equal(work(false), at::ones({4})));
}

// Accesses are told apart by their bytes: halves of a tensor, also of its columns.
TEST_F(Races, OtherBytesAreNoRace) {
  const Stream side = new_stream(device_, false), compute = current_stream(device_);
  const at::Tensor x = at::zeros({4, 6}, options());
  side.wait(compute);
  {
    const StreamGuard guard(side);
    x.narrow(1, 0, 3).fill_(1);
  }
  x.narrow(1, 3, 3).fill_(2);
  EXPECT_THROW(x.narrow(1, 2, 2).fill_(3), sim::RaceError);
  compute.wait(side);
  EXPECT_EQ(x.sum().item<double>(), 12 + 24);
}

// An event covers what was before it, and nothing after.
TEST_F(Races, AnEventIsAPlace) {
  const Stream side = new_stream(device_, false), compute = current_stream(device_);
  const at::Tensor x = at::zeros({4}, options()), y = at::zeros({4}, options());
  side.wait(compute);
  Event event;
  {
    const StreamGuard guard(side);
    x.add_(1);
    event = side.record();
    y.add_(1);
  }
  compute.wait(event);
  EXPECT_EQ(x.sum().item<double>(), 4);
  EXPECT_THROW((void)(y + 1), sim::RaceError);
}

// The order goes on from stream to stream.
TEST_F(Races, WaitsAreTransitive) {
  const Stream a = new_stream(device_, false), b = new_stream(device_, false);
  const Stream compute = current_stream(device_);
  const at::Tensor x = at::zeros({4}, options());
  a.wait(compute);
  {
    const StreamGuard guard(a);
    x.add_(1);
  }
  b.wait(a);
  compute.wait(b);
  EXPECT_EQ((x + 1).sum().item<double>(), 8);
}

TEST_F(Races, TheReportNamesThePlaceAndTheThread) {
  const Stream side = new_stream(device_, false), compute = current_stream(device_);
  const at::Tensor x = at::zeros({4}, options());
  side.wait(compute);
  {
    RECORD_USER_SCOPE("FSDP::all_gather (layers.0)");
    const StreamGuard on_side(side);
    x.add_(1);
  }
  try {
    (void)(x + 1);
    FAIL() << "no race";
  } catch (const sim::RaceError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("sim: a race for 16 bytes."), std::string::npos) << text;
    EXPECT_NE(text.find(", in FSDP::all_gather (layers.0), by thread "), std::string::npos) << text;
  }
}

TEST_F(Races, EnableRefusesOtherNumbers) {
  EXPECT_THROW(sim::enable(3), ConfigError);
  EXPECT_THROW(sim::enable(0), ConfigError);
  EXPECT_THROW(sim::enable(128), ConfigError);
}

}  // namespace
}  // namespace fsdp
