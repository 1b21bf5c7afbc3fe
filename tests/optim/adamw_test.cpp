#include "fsdp/adamw.h"

#include <cmath>
#include <sstream>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>

#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "shard/storage.h"
#include "support/messages.h"
#include "support/models.h"

namespace fsdp {
namespace {

using testing::expect_message;
using torch::optim::OptimizerParamGroup;
using Params = std::vector<at::Tensor>;

// Parameters of several sizes; the first element alone is a tail of the kernel's vectors.
Params make_params(at::ScalarType dtype) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(7);
  Params params;
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{5, 7}, {1}, {16}, {4, 4}, {}}) {
    params.push_back(at::randn(sizes, generator).to(dtype).set_requires_grad(true));
  }
  return params;
}

// Gradients of one step. The last parameter but one has its first at step 5, others miss some.
void set_grads(const Params& params, int step, double sign = 1) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(100 + step);
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor grad = at::randn(params[i].sizes(), generator) * sign;
    const bool is_missing = i == 3 ? step < 5 : (static_cast<size_t>(step) + i) % 7 == 3;
    at::Tensor(params[i]).mutable_grad() =
        is_missing ? at::Tensor() : grad.to(params[i].scalar_type());
  }
}

// Two groups, the second without weight decay; what it does not set is the optimizer's.
template <class Options>
std::vector<OptimizerParamGroup> two_groups(const Params& params) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Params(params.begin(), params.begin() + 2));
  groups.emplace_back(Params(params.begin() + 2, params.end()),
                      std::make_unique<Options>(Options().weight_decay(0)));
  return groups;
}

const AdamWParamState& state_of(AdamW& optimizer, const at::Tensor& param) {
  return static_cast<const AdamWParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

// AdamW as the paper has it, one number at a time, rounding what is stored to the dtype.
class ScalarAdamW {
 public:
  ScalarAdamW(const at::Tensor& param, AdamWOptions options)
      : param_(param.detach().clone()),
        exp_avg_(at::zeros_like(param_)),
        exp_avg_sq_(at::zeros_like(param_)),
        max_exp_avg_sq_(at::zeros_like(param_)),
        options_(options) {}

  void step(const at::Tensor& grad) {
    if (!grad.defined()) return;
    ++step_;
    for (int64_t i = 0; i < param_.numel(); ++i)
      step_element(grad.reshape(-1)[i].item<double>(), i);
  }
  const at::Tensor& param() const { return param_; }

 private:
  static double load(const at::Tensor& tensor, int64_t i) {
    return tensor.view(-1)[i].item<double>();
  }
  void step_element(double grad, int64_t i) {
    const auto& [beta1, beta2] = options_.betas();
    if (options_.maximize()) grad = -grad;
    const double exp_avg = beta1 * load(exp_avg_, i) + (1 - beta1) * grad;
    const double exp_avg_sq = beta2 * load(exp_avg_sq_, i) + (1 - beta2) * grad * grad;
    const double max_exp_avg_sq = std::max(load(max_exp_avg_sq_, i), exp_avg_sq);
    const double average = exp_avg / (1 - std::pow(beta1, step_));
    const double square =
        (options_.amsgrad() ? max_exp_avg_sq : exp_avg_sq) / (1 - std::pow(beta2, step_));
    const double decayed = load(param_, i) * (1 - options_.lr() * options_.weight_decay());
    param_.view(-1)[i] = decayed - options_.lr() * average / (std::sqrt(square) + options_.eps());
    exp_avg_.view(-1)[i] = exp_avg;
    exp_avg_sq_.view(-1)[i] = exp_avg_sq;
    max_exp_avg_sq_.view(-1)[i] = max_exp_avg_sq;
  }

  at::Tensor param_, exp_avg_, exp_avg_sq_, max_exp_avg_sq_;
  AdamWOptions options_;
  int step_ = 0;
};

struct AdamWCase {
  const char* name;
  at::ScalarType dtype;
  bool amsgrad, maximize;
  double tolerance;  // relative
};

class AdamWTest : public ::testing::TestWithParam<AdamWCase> {};

// Promise: parameters are those of torch's optimizer and of the formulas over 20 steps, with two
// weight decays and with gradients that are missing at some steps.
// Tolerance: 20 steps of rounding to the dtype: 24, 53 and 8 bits. torch's C++ AdamW rounds bf16
// after each operation, the fused kernel once a step, so bf16 is compared with the formulas alone.
TEST_P(AdamWTest, EqualsTorchAndTheFormulas) {
  const auto& [name, dtype, amsgrad, maximize, tolerance] = GetParam();
  const auto options =
      AdamWOptions(1e-2).betas({0.8, 0.99}).weight_decay(0.1).amsgrad(amsgrad).maximize(maximize);
  const Params ours = make_params(dtype);
  AdamW optimizer(two_groups<AdamWOptions>(ours), options);
  const Params theirs = make_params(dtype);
  using TorchOptions = torch::optim::AdamWOptions;
  torch::optim::AdamW torch_optimizer(
      two_groups<TorchOptions>(theirs),
      TorchOptions(1e-2).betas({0.8, 0.99}).weight_decay(0.1).amsgrad(amsgrad));
  std::vector<ScalarAdamW> scalars;
  for (size_t i = 0; i < ours.size(); ++i) {
    scalars.emplace_back(ours[i], AdamWOptions(options).weight_decay(i < 2 ? 0.1 : 0));
  }
  for (int step = 0; step < 20; ++step) {
    set_grads(ours, step);
    set_grads(theirs, step, maximize ? -1 : 1);  // torch's C++ AdamW only descends
    optimizer.step();
    torch_optimizer.step();
    for (size_t i = 0; i < ours.size(); ++i) {
      scalars[i].step(ours[i].grad());
      EXPECT_TRUE(ours[i].allclose(scalars[i].param(), tolerance, tolerance))
          << "formulas, step " << step << ", parameter " << i;
      EXPECT_TRUE(dtype == at::kBFloat16 || ours[i].allclose(theirs[i], tolerance, tolerance))
          << "torch, step " << step << ", parameter " << i;
    }
  }
  EXPECT_EQ(state_of(optimizer, ours[3]).step.item<float>(), 15);
  EXPECT_EQ(state_of(optimizer, ours[0]).max_exp_avg_sq.defined(), amsgrad);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, AdamWTest,
    ::testing::Values(AdamWCase{"Plain", at::kFloat, false, false, 1e-6},
                      AdamWCase{"Amsgrad", at::kFloat, true, false, 1e-6},
                      AdamWCase{"Maximize", at::kFloat, false, true, 1e-6},
                      AdamWCase{"AmsgradMaximize", at::kFloat, true, true, 1e-6},
                      AdamWCase{"Double", at::kDouble, true, false, 1e-14},
                      AdamWCase{"BFloat16", at::kBFloat16, false, false, 1.0 / 128},
                      AdamWCase{"BFloat16Amsgrad", at::kBFloat16, true, false, 1.0 / 128}),
    [](const auto& info) { return info.param.name; });

// Promise: training sharded is training in one process, parameters and state, whatever the number
// of ranks, also where shards are empty (3 rows of out_proj over 8 ranks). World 1: bit-equal.
TEST(AdamW, TrainsOnShards) {
  struct Result {
    Params params, exp_avgs, steps;
  };
  const auto run = [](bool shard) {
    testing::MLP model(3);
    testing::init_parameters(*model);
    if (shard) fully_shard(*model);
    const Params params = parameters(*model);
    AdamW optimizer(params, AdamWOptions(1e-2).weight_decay(0.1));
    for (int step = 0; step < 6; ++step) {
      model(at::ones({2, 3}) * (step + 1)).sum().backward();
      optimizer.step();
      optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
    }
    Result result;
    for (const at::Tensor& param : params) {
      const AdamWParamState& state = state_of(optimizer, param);
      result.params.push_back(full_tensor(param).detach());
      result.exp_avgs.push_back(full_tensor(state.exp_avg).clone());
      result.steps.push_back(state.step.clone());
    }
    return result;
  };
  const Result expected = run(/*shard=*/false);
  for (const int world_size : {1, 2, 3, 8}) {
    run_ranks(world_size, [&](const ProcessGroupPtr&) {
      const Result ours = run(/*shard=*/true);
      const double tolerance = world_size == 1 ? 0 : 1e-6;
      for (size_t i = 0; i < expected.params.size(); ++i) {
        EXPECT_TRUE(ours.params[i].allclose(expected.params[i], tolerance, tolerance)) << i;
        EXPECT_TRUE(ours.exp_avgs[i].allclose(expected.exp_avgs[i], tolerance, tolerance)) << i;
        EXPECT_TRUE(ours.steps[i].equal(expected.steps[i])) << i;
      }
    });
  }
}

// How many tensors each call of the fused kernel on this thread got, while it lives. One at a time.
class KernelCalls {
 public:
  KernelCalls() {
    calls.clear();
    library_.fallback(torch::CppFunction::makeFromBoxedFunction<&record>());
  }

  std::vector<size_t> take() { return std::exchange(calls, {}); }

 private:
  static constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

  static void record(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    if (op.schema().name() == "aten::_fused_adamw_") {
      calls.push_back((*stack)[0].toTensorList().size());
    }
    const c10::impl::ExcludeDispatchKeyGuard past_this(kKey);
    op.callBoxed(stack);
  }
  static thread_local std::vector<size_t> calls;  // record() is a plain function
  torch::Library library_{torch::Library::IMPL, "_", kKey, __FILE__, __LINE__};
  const c10::impl::IncludeDispatchKeyGuard on_this_thread_{kKey};
};
thread_local std::vector<size_t> KernelCalls::calls;

// Promise: one kernel call per group and dtype, over the parameters that have a gradient and
// elements; none if there are none.
TEST(AdamW, OneCallPerGroupAndDtype) {
  Params params = make_params(at::kFloat);
  params[4] = params[4].detach().to(at::kDouble).set_requires_grad(true);
  params.push_back(at::zeros({0, 3}).set_requires_grad(true));
  AdamW optimizer(two_groups<AdamWOptions>(params));
  KernelCalls calls;
  optimizer.step();
  EXPECT_EQ(calls.take(), std::vector<size_t>());
  for (at::Tensor& param : params) param.mutable_grad() = at::ones_like(param.detach());
  optimizer.step();
  EXPECT_EQ(calls.take(), (std::vector<size_t>{2, 2, 1}));
  EXPECT_EQ(state_of(optimizer, params.back()).step.item<float>(), 1);
  params[0].mutable_grad().reset();
  optimizer.step();
  EXPECT_EQ(calls.take(), (std::vector<size_t>{1, 2, 1}));
}

// Promise: each kind of state of a group and dtype is one buffer, made at the first step with a
// gradient; every parameter's part begins at a multiple of 64 bytes and has its shape and strides.
TEST(AdamW, StateIsOneBuffer) {
  Params params = make_params(at::kFloat);
  params[1] = params[1].detach();  // frozen
  params.push_back(at::zeros({2, 3, 4, 5}, at::MemoryFormat::ChannelsLast).set_requires_grad(true));
  params.push_back(at::zeros({3}, at::kDouble).set_requires_grad(true));
  AdamW optimizer(params, AdamWOptions().amsgrad(true));
  optimizer.step();
  EXPECT_TRUE(optimizer.state().empty());
  params[0].mutable_grad() = at::ones_like(params[0].detach());
  params[6].mutable_grad() = at::ones_like(params[6].detach());
  optimizer.step();

  EXPECT_EQ(optimizer.state().count(params[1].unsafeGetTensorImpl()), 0);
  const AdamWParamState& first = state_of(optimizer, params[0]);
  const AdamWParamState& of_double = state_of(optimizer, params[6]);
  int64_t end = 0;
  for (const size_t i : {0, 2, 3, 4, 5}) {
    for (const auto kind : {&AdamWParamState::step, &AdamWParamState::exp_avg,
                            &AdamWParamState::exp_avg_sq, &AdamWParamState::max_exp_avg_sq}) {
      const at::Tensor& state = state_of(optimizer, params[i]).*kind;
      EXPECT_TRUE(state.is_alias_of(first.*kind)) << i;
      EXPECT_FALSE(state.is_alias_of(of_double.*kind)) << i;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(state.data_ptr()) % 64, 0) << i;
    }
    const at::Tensor& exp_avg = state_of(optimizer, params[i]).exp_avg;
    EXPECT_EQ(exp_avg.sizes(), params[i].sizes());
    EXPECT_EQ(exp_avg.strides(), params[i].strides());
    EXPECT_EQ(static_cast<const float*>(exp_avg.data_ptr()),
              static_cast<const float*>(first.exp_avg.data_ptr()) + (end + 15) / 16 * 16);
    end = (end + 15) / 16 * 16 + exp_avg.numel();
  }
  EXPECT_EQ(of_double.exp_avg.scalar_type(), at::kDouble);
  EXPECT_EQ(state_of(optimizer, params[2]).step.item<float>(), 0);

  params[1].set_requires_grad(true).mutable_grad() = at::ones({1});  // no longer frozen
  optimizer.step();
  EXPECT_FALSE(state_of(optimizer, params[1]).exp_avg.is_alias_of(first.exp_avg));
  EXPECT_EQ(state_of(optimizer, params[1]).step.item<float>(), 1);
}

// Parameters of 16, 5, 3 and 32 elements in one storage at multiples of 64 bytes, and so their
// gradients. 2 elements lie before them.
struct OneStorage {
  at::Tensor flat = at::zeros({2 + 80}), flat_grad = at::zeros({2 + 80});
  Params params;

  OneStorage() {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(3);
    for (const auto& [offset, numel] :
         std::vector<std::pair<int64_t, int64_t>>{{2, 16}, {18, 5}, {34, 3}, {50, 32}}) {
      flat.narrow(0, offset, numel).copy_(at::randn({numel}, generator));
      at::Tensor param = tensor_over(flat.storage(), at::kFloat, offset, {numel});
      param.set_requires_grad(true);
      param.mutable_grad() = flat_grad.narrow(0, offset, numel);
      params.push_back(param);
    }
  }
  void set_grads(int step) const {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(step);
    for (const at::Tensor& param : params) {
      if (param.grad().defined()) param.grad().copy_(at::randn({param.numel()}, generator));
    }
  }
};

class AdamWMergeTest : public ::testing::TestWithParam<bool> {};

// Promise: neighbours in memory go to the kernel as one tensor; parameters and state are those of
// the parameters on their own (to the rounding of the kernel's vectors and their tail), the padding
// stays zero, and the version of each parameter moves by one.
TEST_P(AdamWMergeTest, NeighboursAreOneTensor) {
  const auto options = AdamWOptions(1e-2).weight_decay(0.1).amsgrad(GetParam());
  const OneStorage merged;
  const OneStorage source;
  Params alone;
  for (const at::Tensor& param : source.params) {
    alone.push_back(param.detach().clone().set_requires_grad(true));
    alone.back().mutable_grad() = param.grad();
  }
  AdamW optimizer(merged.params, options);
  AdamW reference(alone, options);
  KernelCalls calls;
  for (int step = 0; step < 5; ++step) {
    merged.set_grads(step);
    source.set_grads(step);
    const auto version = merged.params[1]._version();
    optimizer.step();
    EXPECT_EQ(merged.params[1]._version(), version + 1);
    EXPECT_EQ(calls.take(), std::vector<size_t>{1});
    reference.step();
    EXPECT_EQ(calls.take(), std::vector<size_t>{4});
  }
  for (size_t i = 0; i < alone.size(); ++i) {
    EXPECT_TRUE(merged.params[i].allclose(alone[i], 1e-6, 1e-6)) << i;
    EXPECT_TRUE(state_of(optimizer, merged.params[i])
                    .exp_avg_sq.allclose(state_of(reference, alone[i]).exp_avg_sq, 1e-6, 1e-6));
    EXPECT_EQ(state_of(optimizer, merged.params[i]).step.item<float>(), 5);
  }
  EXPECT_EQ(merged.flat.narrow(0, 23, 11).count_nonzero().item<int64_t>(), 0);
  EXPECT_EQ(merged.flat.narrow(0, 37, 13).count_nonzero().item<int64_t>(), 0);
}
INSTANTIATE_TEST_SUITE_P(Amsgrad, AdamWMergeTest, ::testing::Bool());

// Promise: nothing is merged over an element that is not zero in parameter or gradient, as it may
// be somebody's; nor where counts of steps, places of gradients or groups differ.
TEST(AdamW, MergesOnlyWhatIsSafe) {
  const auto tensors_of_calls = [](OneStorage& storage, AdamW& optimizer) {
    storage.set_grads(0);
    KernelCalls calls;
    optimizer.step();
    return calls.take();
  };
  const auto tensors_of = [&](OneStorage storage, const AdamWOptions& options) {
    AdamW optimizer(storage.params, options);
    return tensors_of_calls(storage, optimizer);
  };
  EXPECT_EQ(tensors_of({}, {}), std::vector<size_t>{1});
  EXPECT_EQ(tensors_of({}, AdamWOptions().eps(0)), std::vector<size_t>{4});  // 0 / 0

  OneStorage foreign;
  foreign.flat[24] = 1.0;  // between the second and the third
  EXPECT_EQ(tensors_of(foreign, {}), std::vector<size_t>{2});
  EXPECT_EQ(foreign.flat[24].item<float>(), 1.0);

  OneStorage foreign_grad;
  foreign_grad.flat_grad[40] = 1.0;  // between the third and the fourth
  EXPECT_EQ(tensors_of(foreign_grad, {}), std::vector<size_t>{2});
  EXPECT_EQ(foreign_grad.flat[40].item<float>(), 0.0);

  OneStorage other_grad;
  other_grad.params[0].mutable_grad() = at::zeros({2 + 16}).narrow(0, 2, 16);  // other storage
  EXPECT_EQ(tensors_of(other_grad, {}), std::vector<size_t>{2});

  OneStorage moved_grad;
  moved_grad.params[1].mutable_grad() = moved_grad.flat_grad.narrow(0, 20, 5);
  EXPECT_EQ(tensors_of(moved_grad, {}), std::vector<size_t>{3});

  OneStorage frozen;  // the second is not the optimizer's
  frozen.params.erase(frozen.params.begin() + 1);
  const at::Tensor before = frozen.flat.narrow(0, 18, 5).clone();
  EXPECT_EQ(tensors_of(frozen, {}), std::vector<size_t>{2});
  EXPECT_TRUE(frozen.flat.narrow(0, 18, 5).equal(before));

  OneStorage skipped;  // the second has no gradient at the second step, but a state
  skipped.flat.narrow(0, 18, 5).zero_();
  AdamW without_lr(skipped.params, AdamWOptions(0.0));
  EXPECT_EQ(tensors_of_calls(skipped, without_lr), std::vector<size_t>{1});
  skipped.params[1].mutable_grad().reset();
  skipped.flat_grad.narrow(0, 18, 5).zero_();
  const at::Tensor exp_avg = state_of(without_lr, skipped.params[1]).exp_avg;
  const at::Tensor exp_avg_before = exp_avg.clone();
  EXPECT_EQ(tensors_of_calls(skipped, without_lr), std::vector<size_t>{2});
  EXPECT_TRUE(exp_avg.equal(exp_avg_before));

  OneStorage grouped;
  AdamW two(two_groups<AdamWOptions>(grouped.params));
  EXPECT_EQ(tensors_of_calls(grouped, two), (std::vector<size_t>{1, 1}));

  OneStorage missing;
  AdamW optimizer(missing.params);
  const at::Tensor grad = missing.params[3].grad();
  missing.params[3].mutable_grad().reset();
  EXPECT_EQ(tensors_of_calls(missing, optimizer), std::vector<size_t>{1});
  missing.params[3].mutable_grad() = grad;
  EXPECT_EQ(tensors_of_calls(missing, optimizer), std::vector<size_t>{2});  // steps 2 and 1
}

// Promise: a step moves the version of each parameter that it changes, and of no other; gradients
// are set to none or to zero; the closure's value is returned, and runs with autograd.
TEST(AdamW, VersionsZeroGradAndClosure) {
  Params params = make_params(at::kFloat);
  std::vector<uint32_t> versions;
  for (const at::Tensor& param : params) versions.push_back(param._version());
  AdamW optimizer(params);
  const at::Tensor loss = optimizer.step([&] {
    at::Tensor sum = params[0].sum() + params[2].sum();
    sum.backward();
    return sum;
  });
  EXPECT_TRUE(loss.requires_grad());
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_EQ(params[i]._version() - versions[i], i == 0 || i == 2 ? 1 : 0) << i;
  }
  optimizer.zero_grad(/*set_to_none=*/false);
  EXPECT_TRUE(params[0].grad().equal(at::zeros({5, 7})));
  optimizer.zero_grad();
  EXPECT_FALSE(params[0].grad().defined());
}

// Promise: elements are paired by index, not by place in memory, for any strides of parameter and
// gradient.
TEST(AdamW, AnyDenseStrides) {
  const at::Tensor values_RC = at::arange(1.0, 13).view({3, 4});
  at::Tensor rows = values_RC.clone().set_requires_grad(true);
  at::Tensor columns = values_RC.t().contiguous().t().set_requires_grad(true);
  ASSERT_NE(rows.strides(), columns.strides());
  const at::Tensor grad_RC = at::arange(-6.0, 6).view({3, 4});
  AdamW optimizer({rows, columns});
  for (int step = 0; step < 2; ++step) {
    rows.mutable_grad() = step == 0 ? grad_RC : grad_RC.t().contiguous().t();
    columns.mutable_grad() = grad_RC;
    optimizer.step();
  }
  EXPECT_TRUE(rows.allclose(columns, 1e-6, 1e-6));
  EXPECT_FALSE(rows.allclose(values_RC, 1e-6, 1e-6));
}

// Promise: options that a group sets are its own, the others the optimizer's, also for a group
// that comes later; a learning-rate scheduler changes them.
TEST(AdamW, OptionsOfGroups) {
  const Params params = make_params(at::kFloat);
  AdamW optimizer(two_groups<AdamWOptions>(params),
                  AdamWOptions(0.5).betas({0.1, 0.2}).weight_decay(0.3).maximize(true));
  optimizer.add_param_group(OptimizerParamGroup(
      {at::zeros({2})},
      std::make_unique<AdamWOptions>(AdamWOptions(0.25).betas({0.3, 0.4}).eps(1).amsgrad(true))));
  const auto options = [&](size_t group) {
    return static_cast<const AdamWOptions&>(optimizer.param_groups()[group].options());
  };
  EXPECT_EQ(options(0).weight_decay(), 0.3);
  EXPECT_EQ(options(1).weight_decay(), 0);
  EXPECT_EQ(options(1).lr(), 0.5);
  EXPECT_EQ(options(1).betas(), AdamWOptions::betas_t(0.1, 0.2));
  EXPECT_TRUE(options(1).maximize());
  EXPECT_EQ(options(2).lr(), 0.25);
  EXPECT_EQ(options(2).betas(), AdamWOptions::betas_t(0.3, 0.4));
  EXPECT_EQ(options(2).eps(), 1);
  EXPECT_TRUE(options(2).amsgrad() && options(2).maximize());
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.5);
  scheduler.step();  // counts from 0
  scheduler.step();
  EXPECT_EQ(options(0).lr(), 0.25);
  EXPECT_EQ(options(2).lr(), 0.125);
}

// Promise: torch::save and torch::load carry options and state over to another optimizer, which
// goes on bit for bit, with its state in one buffer again.
TEST(AdamW, SaveAndLoad) {
  const auto options = AdamWOptions(1e-2).amsgrad(true).maximize(true);
  const Params params = make_params(at::kFloat);
  AdamW optimizer(two_groups<AdamWOptions>(params), options);
  std::stringstream before_first_step;
  torch::save(optimizer, before_first_step);
  for (int step = 0; step < 4; ++step) {
    set_grads(params, step);
    optimizer.step();
  }
  std::stringstream file;
  torch::save(optimizer, file);

  Params copies;
  for (const at::Tensor& param : params) {
    copies.push_back(param.detach().clone().set_requires_grad(true));
  }
  AdamW loaded(two_groups<AdamWOptions>(copies));
  torch::load(loaded, file);
  EXPECT_TRUE(state_of(loaded, copies[3]).exp_avg.is_alias_of(state_of(loaded, copies[2]).exp_avg));
  for (int step = 4; step < 8; ++step) {
    set_grads(params, step);
    set_grads(copies, step);
    optimizer.step();
    loaded.step();
  }
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(copies[i].equal(params[i])) << i;
    EXPECT_TRUE(state_of(loaded, copies[i]).step.equal(state_of(optimizer, params[i]).step)) << i;
  }
  torch::load(loaded, before_first_step);
  EXPECT_TRUE(loaded.state().empty());
}

// Promise: a state of other shapes is refused, and nothing changes.
TEST(AdamW, LoadsNoStateOfOtherShapes) {
  at::Tensor saved = at::ones({4}).set_requires_grad(true);
  saved.mutable_grad() = at::ones({4});
  AdamW source({saved}, AdamWOptions(0.5));
  source.step();
  std::stringstream file;
  torch::save(source, file);

  at::Tensor param = at::ones({1}).set_requires_grad(true);
  param.mutable_grad() = at::ones({1});
  AdamW optimizer({param});
  optimizer.step();
  expect_message<CheckpointError>(
      [&] { torch::load(optimizer, file); },
      "AdamW: a parameter of group 0 is of shape [1], but its saved state of shape [4]. It is of "
      "another model, rank or number of ranks; nothing was loaded.");
  EXPECT_EQ(state_of(optimizer, param).step.item<float>(), 1);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1e-3);
}

// Promise: each rank's shards and their state survive a save and load, also where they are empty.
TEST(AdamW, SaveAndLoadOfShards) {
  run_ranks(3, [](const ProcessGroupPtr&) {
    const DeviceMeshPtr mesh = init_device_mesh(c10::DeviceType::CPU);
    const auto make = [&] {  // 4 rows over 3 ranks: 2, 2, 0
      at::Tensor param = distribute_tensor(at::arange(8.0).view({4, 2}), mesh);
      param.set_requires_grad(true).mutable_grad() = at::ones(param.sizes());
      return param;
    };
    at::Tensor param = make();
    AdamW optimizer({param});
    optimizer.step();
    std::stringstream file;
    torch::save(optimizer, file);
    at::Tensor other = make();
    AdamW loaded({other});
    torch::load(loaded, file);
    const AdamWParamState& state = state_of(loaded, other);
    EXPECT_EQ(state.step.item<float>(), 1);
    EXPECT_TRUE(full_tensor(state.exp_avg).allclose(at::full({4, 2}, 0.1)));
  });
}

}  // namespace
}  // namespace fsdp
