#include <ATen/ops/matmul.h>
#include <ATen/ops/relu.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/replicate.h"
#include "reference/world.h"
#include "support/layouts.h"
#include "support/models.h"
#include "support/recorder.h"

// Class UnshardMultiProcess of the reference suite (docs/parity.md): unshard() called by hand, so
// that gathers overlap with a forward's own collectives, in a model part sharded, part replicated.

namespace fsdp {
namespace {

using testing::MLP;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr int64_t kDim = 8;
constexpr int64_t kBatch = 2;
constexpr int kNumMlps = 3;

/// y = relu(x W), and the sum of y over the ranks, in place, that is on its way. Autograd does not
/// know of the sum.
struct ReduceModuleImpl : torch::nn::Module {
  explicit ReduceModuleImpl(ProcessGroupPtr group) : group_(std::move(group)) {
    weight = register_parameter("weight", at::zeros({kDim, kDim}));
  }
  std::pair<at::Tensor, WorkPtr> forward(const at::Tensor& x_BD) {
    const at::Tensor y_BD = at::relu(at::matmul(x_BD, weight));
    std::vector<at::Tensor> tensors{y_BD.detach()};
    return {y_BD, group_->allreduce(tensors)};
  }
  at::Tensor weight;

 private:
  const ProcessGroupPtr group_;
};
FSDP_MODULE(ReduceModule);

struct MLPsImpl : torch::nn::Module {
  MLPsImpl() {
    for (int i = 0; i < kNumMlps; ++i) {
      mlps.push_back(register_module("mlp" + std::to_string(i + 1), MLP(kDim)));
    }
  }
  at::Tensor forward(const std::vector<at::Tensor>& ys, const std::vector<WorkPtr>& works) {
    at::Tensor sum;
    for (size_t i = 0; i < mlps.size(); ++i) {
      works[i]->wait();
      const at::Tensor z = mlps[i](ys[i]);
      sum = sum.defined() ? sum + z : z;
    }
    return sum;
  }
  std::vector<MLP> mlps;
};
FSDP_MODULE(MLPs);

struct ReduceModelImpl : torch::nn::Module {
  explicit ReduceModelImpl(const ProcessGroupPtr& group) {
    for (int i = 0; i < kNumMlps; ++i) {
      reduce_modules.push_back(
          register_module("reduce_module" + std::to_string(i + 1), ReduceModule(group)));
    }
    mlps = register_module("mlps", MLPs());
  }
  at::Tensor forward(const at::Tensor& x_BD) {
    std::vector<at::Tensor> ys;
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < reduce_modules.size(); ++i) {
      auto [y, work] = reduce_modules[i](x_BD);
      ys.push_back(std::move(y));
      works.push_back(std::move(work));
      MLP& mlp = mlps->mlps[i];
      if (mlp->is_fully_sharded()) static_cast<void>(mlp->unshard_async());
    }
    return mlps(ys, works);
  }
  std::vector<ReduceModule> reduce_modules;
  MLPs mlps{nullptr};
};
FSDP_MODULE(ReduceModel);

ReduceModel make_model(const ProcessGroupPtr& group) {
  ReduceModel model(group);
  testing::init_parameters(*model);
  return model;
}

class UnshardMultiProcess : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(UnshardMultiProcess);

// Promise: gathers that were begun by hand, each behind an all-reduce that is in flight, change no
// loss of ten steps against the model that is only replicated; and none is begun a second time.
TEST_P(UnshardMultiProcess, test_unshard_async) {
  testing::run_world(2, [&](const ProcessGroupPtr& group) {
    const c10::Device device = testing::suite_device();
    ReduceModel reference = make_model(group);
    reference->to(device);
    replicate(*reference);
    torch::optim::Adam reference_optimizer(reference->parameters(),
                                           torch::optim::AdamOptions(1e-2));

    ReduceModel model = make_model(group);
    for (ReduceModule& module : model->reduce_modules) module->to(device);  // is not sharded
    for (MLP& mlp : model->mlps->mlps) {
      fully_shard(*mlp, testing::shard_options(GetParam(), /*reshard_after_forward=*/false));
    }
    fully_shard(*model->mlps, testing::shard_options(GetParam()));
    replicate(*model);
    torch::optim::Adam optimizer(parameters(*model), torch::optim::AdamOptions(1e-2));
    const auto recorder = std::make_shared<testing::Recorder>();
    set_schedule_observer(*model, recorder);

    const at::Tensor input_BD = testing::seeded_randn({kBatch, kDim}, 42 + group->getRank() + 1);
    for (int step = 0; step < 10; ++step) {
      const at::Tensor reference_loss = reference(input_BD).sum();
      const at::Tensor loss = model(input_BD).sum();
      // The tolerance of the reference suite: sums are taken in another order.
      EXPECT_TRUE(loss.allclose(reference_loss, 1.3e-6, 1e-5))
          << "step " << step << ": " << loss << " " << reference_loss;
      const std::vector<std::string> first{"U '' IDLE", "U '' IDLE", "U '' IDLE"};  // no paths yet
      const std::vector<std::string> later{"U 'mlp1' IDLE", "U 'mlp2' IDLE", "U 'mlp3' IDLE"};
      EXPECT_EQ(recorder->take(), step == 0 ? first : later);
      reference_loss.backward();
      loss.backward();
      testing::note_value(loss);
      testing::note_gradients(*model);
      EXPECT_EQ(recorder->take(), testing::backward_events("Pmlp3 Pmlp2 Pmlp1"));
      reference_optimizer.step();
      optimizer.step();
      reference_optimizer.zero_grad();
      optimizer.zero_grad();
    }
  });
}

}  // namespace
}  // namespace fsdp
