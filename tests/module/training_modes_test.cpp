#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include "fsdp/fully_shard.h"
#include "fsdp/sharded_tensor.h"
#include "support/layouts.h"
#include "support/messages.h"
#include "support/training.h"

// Mixed precision, accumulation, several forwards, and steps that throw.

namespace fsdp {
namespace {

using testing::TrainingOptions;
using testing::Transformer;

TrainingOptions small_options() {
  return {.model = {.num_layers = 2,
                    .vocab_size = 13,
                    .max_seq_len = 7,
                    .dim = 15,
                    .num_heads = 3,
                    .ffn_dim = 17,
                    .weight_tying = false}};
}

Transformer sharded_model(const TrainingOptions& options, const FullyShardOptions& shard) {
  Transformer model = testing::make_model(options.model);
  testing::shard_blocks_and_root(model, shard);
  return model;
}

std::vector<at::Tensor> whole_grads(Transformer& model) {
  std::vector<at::Tensor> grads;
  for (const at::Tensor& param : model->parameters()) {
    grads.push_back(param.grad().defined() ? full_tensor(param.grad()).clone() : at::Tensor());
  }
  return grads;
}

void expect_close(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& expected,
                  double tolerance = 1e-5) {
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    ASSERT_EQ(ours[i].defined(), expected[i].defined()) << "parameter " << i;
    if (!ours[i].defined()) continue;
    EXPECT_TRUE(ours[i].allclose(expected[i], tolerance, tolerance))
        << "parameter " << i << " differs by " << (ours[i] - expected[i]).abs().max().item<float>();
  }
}

class MixedPrecision : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(MixedPrecision);

// Promise: with bf16 compute, forward and gradients are those of a bf16 copy of the model, and the
// mean over ranks is taken in the reduce dtype; parameters, gradients and optimizer stay fp32.
// One reduction per run, so the expected value is exact: sum in rank order, rounded once.
TEST_P(MixedPrecision, Bf16ComputesAsABf16ModelDoes) {
  const TrainingOptions options = small_options();
  for (const std::optional<at::ScalarType> reduce_dtype :
       {std::optional<at::ScalarType>(), std::optional<at::ScalarType>(at::kFloat)}) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      FullyShardOptions shard{.layout = GetParam()};
      shard.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = reduce_dtype};
      Transformer model = sharded_model(options, shard);
      const at::Tensor tokens = testing::batch_of_step(options, 0);

      std::vector<std::vector<at::Tensor>> rank_grads;
      for (int rank = 0; rank < 2; ++rank) {
        Transformer low = testing::make_model(options.model);
        low->to(at::kBFloat16);
        const at::Tensor loss = testing::loss_of(low, tokens.narrow(0, rank * 12, 12));
        loss.backward();
        auto& grads = rank_grads.emplace_back();
        for (const at::Tensor& param : low->parameters()) grads.push_back(param.grad());
        if (rank == group->getRank()) {
          const at::Tensor ours = testing::loss_of(model, tokens.narrow(0, rank * 12, 12));
          EXPECT_EQ(ours.item<float>(), loss.item<float>());
          ours.backward();
        }
      }
      const std::vector<at::Tensor> ours = whole_grads(model);
      for (size_t i = 0; i < ours.size(); ++i) {
        const at::Tensor sum = rank_grads[0][i].to(at::kFloat) + rank_grads[1][i].to(at::kFloat);
        const at::Tensor mean = (sum / 2).to(reduce_dtype.value_or(at::kBFloat16)).to(at::kFloat);
        EXPECT_EQ(ours[i].scalar_type(), at::kFloat);
        EXPECT_TRUE(ours[i].equal(mean)) << "parameter " << i;
      }
      for (const at::Tensor& param : model->parameters())
        EXPECT_EQ(param.scalar_type(), at::kFloat);
    });
  }
}

// Promise: output_dtype casts outputs, cast_forward_inputs=false leaves inputs alone.
TEST_P(MixedPrecision, CastsAtTheModuleBoundary) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    fsdp::nn::Linear model(4, 4);
    fully_shard(*model, {.mp_policy = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat},
                         .layout = GetParam()});
    EXPECT_EQ(model(at::ones({2, 4})).scalar_type(), at::kFloat);
    model->unshard();
    EXPECT_EQ(model->weight.scalar_type(), at::kBFloat16);

    fsdp::nn::Linear strict(4, 4);
    fully_shard(*strict, {.mp_policy = {.param_dtype = at::kBFloat16, .cast_forward_inputs = false},
                          .layout = GetParam()});
    EXPECT_THROW(strict(at::ones({2, 4})), c10::Error);
    EXPECT_EQ(strict(at::ones({2, 4}, at::kBFloat16)).scalar_type(), at::kBFloat16);
  });
}

class GradientAccumulation : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(GradientAccumulation);

// Promise: accumulated over microbatches, with a reduction each time or only at the end, in every
// combination with reshard, gradients are those of the sum over the microbatches.
TEST_P(GradientAccumulation, EqualsOneProcess) {
  const TrainingOptions options = small_options();
  constexpr int kMicrobatches = 3;
  Transformer reference = testing::make_model(options.model);
  for (int i = 0; i < kMicrobatches; ++i) {
    testing::loss_of(reference, testing::batch_of_step(options, i)).backward();
  }
  std::vector<at::Tensor> expected;
  for (const at::Tensor& param : reference->parameters()) expected.push_back(param.grad());

  run_ranks(4, [&](const ProcessGroupPtr& group) {
    for (const bool sync_each : {true, false}) {
      for (const bool reshard_after_backward : {true, false}) {
        for (const ReshardAfterForward& reshard :
             {ReshardAfterForward(true), ReshardAfterForward(false),
              ReshardAfterForward(int64_t{2})}) {
          for (const bool hsdp : {false, true}) {
            FullyShardOptions shard{.reshard_after_forward = reshard, .layout = GetParam()};
            if (hsdp) {
              shard.mesh = init_device_mesh(c10::DeviceType::CPU, {2, 2}, {"replicate", "shard"});
            }
            Transformer model = sharded_model(options, shard);
            model->set_reshard_after_backward(reshard_after_backward);
            for (int i = 0; i < kMicrobatches; ++i) {
              const bool last = i == kMicrobatches - 1;
              if (hsdp && sync_each) {
                model->set_requires_all_reduce(last);  // reduce-scatter only, until the last
              } else {
                model->set_requires_gradient_sync(sync_each || last);
              }
              model->set_is_last_backward(last);
              const at::Tensor tokens =
                  testing::batch_of_step(options, i).narrow(0, 6 * group->getRank(), 6);
              testing::loss_of(model, tokens).backward();
            }
            expect_close(whole_grads(model), expected);
          }
        }
      }
    }
  });
}

// Promise: with bf16 compute and fp32 reduction, microbatches without sync add up in fp32.
TEST_P(GradientAccumulation, NoSyncAddsUpInTheReduceDtype) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    fsdp::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
    testing::init_parameters(*model);
    fully_shard(*model, {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat},
                         .layout = GetParam()});
    // 256 + 1 + 1 + 1 is lost in bf16 (it has 8 bits), not in fp32.
    const float inputs[] = {256, 1, 1, 1};
    for (int i = 0; i < 4; ++i) {
      model->set_requires_gradient_sync(i == 3);
      model(at::full({1, 1}, inputs[i])).sum().backward();
    }
    EXPECT_EQ(full_tensor(model->parameters()[0].grad()).item<float>(), 259.0f);
  });
}

class GradientDivideFactor : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(GradientDivideFactor);

// Promise: a custom divide factor divides the sum over all ranks, exactly once: in fp32 and fp16
// reduction, in FSDP and HSDP, with one rank, and where the factor is the number of shards.
TEST_P(GradientDivideFactor, DividesTheSumOnce) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{1}, {4}, {2, 2}, {1, 2}, {4, 1}}) {
    run_ranks(static_cast<int>(c10::multiply_integers(shape)), [&](const ProcessGroupPtr& group) {
      const DeviceMeshPtr mesh =
          init_device_mesh(c10::DeviceType::CPU, shape,
                           shape.size() == 2 ? std::vector<std::string>{"replicate", "shard"}
                                             : std::vector<std::string>{});
      for (const at::ScalarType reduce_dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
        for (const double factor : {0.5, 2.0, 4.0, 8.0}) {  // exact in every dtype
          fsdp::nn::Linear model(torch::nn::LinearOptions(3, 5).bias(false));
          fully_shard(
              *model,
              {.mesh = mesh, .mp_policy = {.reduce_dtype = reduce_dtype}, .layout = GetParam()});
          model->set_gradient_divide_factor(factor);
          model(at::full({1, 3}, group->getRank() + 1.0)).sum().backward();
          const double sum = group->getSize() * (group->getSize() + 1) / 2.0;
          EXPECT_TRUE(
              full_tensor(model->parameters()[0].grad()).equal(at::full({5, 3}, sum / factor)))
              << "factor " << factor << " in " << reduce_dtype << " on mesh " << shape;
        }
      }
    });
  }
}

class SeveralForwards : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(SeveralForwards);

// Promise: two forwards before one backward, also with retain_graph and a second backward, give the
// gradients of one process, and the optimizer's steps in between count.
TEST_P(SeveralForwards, OneBackward) {
  const TrainingOptions options = small_options();
  const at::Tensor tokens_a = testing::batch_of_step(options, 0);
  const at::Tensor tokens_b = testing::batch_of_step(options, 1);
  const auto backward = [&](Transformer& model, int64_t first, int64_t count) {
    const at::Tensor loss = testing::loss_of(model, tokens_a.narrow(0, first, count)) +
                            2 * testing::loss_of(model, tokens_b.narrow(0, first, count));
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  };
  Transformer reference = testing::make_model(options.model);
  backward(reference, 0, 24);
  std::vector<at::Tensor> expected;
  for (const at::Tensor& param : reference->parameters()) expected.push_back(param.grad());
  run_ranks(3, [&](const ProcessGroupPtr& group) {
    for (const bool reshard : {true, false}) {
      Transformer model =
          sharded_model(options, {.reshard_after_forward = reshard, .layout = GetParam()});
      backward(model, 8 * group->getRank(), 8);
      expect_close(whole_grads(model), expected);
    }
  });
}

struct ThrowsOnceImpl : torch::nn::Module {
  ThrowsOnceImpl() { linear = register_module("linear", fsdp::nn::Linear(4, 4)); }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = linear(x);
    if (in_forward) throw std::runtime_error("forward was told to throw");
    if (in_backward) {
      y.register_hook([](const at::Tensor&) { throw std::runtime_error("backward was told to"); });
    }
    return y;
  }
  fsdp::nn::Linear linear{nullptr};
  bool in_forward = false;
  bool in_backward = false;
};
FSDP_MODULE(ThrowsOnce);

struct OuterImpl : torch::nn::Module {
  OuterImpl() {
    first = register_module("first", fsdp::nn::Linear(4, 4));
    thrower = register_module("thrower", ThrowsOnce());
    last = register_module("last", fsdp::nn::Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return last(thrower(first(x))); }
  fsdp::nn::Linear first{nullptr};
  ThrowsOnce thrower{nullptr};
  fsdp::nn::Linear last{nullptr};
};
FSDP_MODULE(Outer);

class Recovery : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(Recovery);

// Promise: after a forward or a backward that threw on every rank, the next step is right, without
// any call by the user: nothing of the broken step is left.
TEST_P(Recovery, NextStepAfterAThrowIsRight) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    Outer model;
    Outer reference;
    testing::init_parameters(*model);
    testing::init_parameters(*reference);
    fully_shard(*model->first, {.layout = GetParam()});
    fully_shard(*model->thrower, {.layout = GetParam()});
    fully_shard(*model, {.layout = GetParam()});
    const at::Tensor x = at::ones({2, 4});
    reference(x).sum().backward();
    for (int round = 0; round < 2; ++round) {
      model->thrower->in_forward = true;
      EXPECT_THROW(model(x), std::runtime_error);
      model->thrower->in_forward = false;
      model->thrower->in_backward = true;
      const at::Tensor loss = model(x).sum();
      EXPECT_ANY_THROW(loss.backward());
      model->thrower->in_backward = false;
      model->zero_grad();
      model(x).sum().backward();
      for (const auto& entry : model->named_parameters()) {
        EXPECT_TRUE(full_tensor(entry.value().grad())
                        .allclose(reference->named_parameters()[entry.key()].grad(), 1e-5, 1e-6))
            << entry.key() << " in round " << round;
      }
    }
  });
}

// Promise: an in-place edit of a module's input is autograd's own error, not a wrong gradient.
TEST_P(Recovery, InPlaceEditOfAnInput) {
  struct EditsImpl : torch::nn::Module {
    EditsImpl() { linear = register_module("linear", torch::nn::Linear(4, 4)); }
    at::Tensor forward(at::Tensor x) { return linear(x.mul_(3)); }
    torch::nn::Linear linear{nullptr};
  };
  FSDP_MODULE(Edits);
  run_ranks(2, [](const ProcessGroupPtr&) {
    Edits model;
    fully_shard(*model, {.layout = GetParam()});
    const at::Tensor x = at::ones({2, 4}).set_requires_grad(true);
    const at::Tensor h = x.exp();
    testing::expect_message<c10::Error>([&] { model(h); }, "is being modified inplace");
  });
}

class Lifetime : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(Lifetime);

// Promise: the graph may outlive the module: its backward still works.
TEST_P(Lifetime, BackwardAfterTheModuleIsGone) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    at::Tensor x = at::ones({2, 15}).set_requires_grad(true);
    at::Tensor y;
    std::vector<at::Tensor> params;
    {
      testing::MLP model(15);
      fully_shard(*model->in_proj, {.layout = GetParam()});
      fully_shard(*model, {.layout = GetParam()});
      params = model->parameters();
      y = model(x).sum();
    }
    y.backward();
    EXPECT_TRUE(x.grad().defined());
    for (const at::Tensor& param : params) EXPECT_TRUE(param.grad().defined());
  });
}

class Evaluation : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(Evaluation);

// Promise: evaluation without gradients gathers and frees as training does, and leaves no trace.
TEST_P(Evaluation, NoGradForwards) {
  const TrainingOptions options = small_options();
  Transformer reference = testing::make_model(options.model);
  const at::Tensor tokens = testing::batch_of_step(options, 0);
  const float expected = testing::loss_of(reference, tokens).item<float>();
  run_ranks(2, [&](const ProcessGroupPtr&) {
    Transformer model = sharded_model(options, {.layout = GetParam()});
    for (int i = 0; i < 3; ++i) {
      const c10::NoGradGuard no_grad;
      EXPECT_EQ(testing::loss_of(model, tokens).item<float>(), expected);
    }
    const at::Tensor loss = testing::loss_of(model, tokens);
    EXPECT_EQ(loss.item<float>(), expected);
    loss.backward();
  });
}

}  // namespace
}  // namespace fsdp
