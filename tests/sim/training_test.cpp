// What training uses besides the schedule, on simulated npus: the CPU's bits in every order of
// execution, and no race. (streams_test.cpp has the schedule itself.)

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "fsdp/activation.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/replicate.h"
#include "fsdp/sharded_tensor.h"
#include "sim/npu_ranks.h"
#include "support/training.h"

namespace fsdp {
namespace {

using testing::Devices;
using testing::Transformer;
using Tensors = std::vector<at::Tensor>;

constexpr int kSteps = 2;
constexpr int kMicroBatches = 2;

// One rank of a run, on the CPU or on an npu, and what it kept.
struct Rank {
  ProcessGroupPtr group;
  c10::Device device;
  Layout layout;
  Tensors found;

  [[nodiscard]] FullyShardOptions options() const {
    return {
        .mesh = init_device_mesh(device.type()), .reshard_after_forward = true, .layout = layout};
  }
};

// Sizes that no number of ranks divides.
testing::TransformerOptions odd_model() {
  return {.vocab_size = 13, .max_seq_len = 8, .dim = 15, .num_heads = 3, .ffn_dim = 37};
}

Tensors tokens_of(const Rank& me) {
  Tensors tokens;
  for (int i = 0; i < kSteps * kMicroBatches; ++i) {
    const at::Tensor run = at::arange(2 * 6) * (3 + i) + 5 * me.group->getRank() + i;
    tokens.push_back(run.remainder(13).view({2, 6}).to(me.device));
  }
  return tokens;
}

struct Training {
  bool syncs_each = true;  // gradients of each micro-batch, not of their sum
  double norm_type = 2;
};

// Nothing here waits for the device: that would stand in for waits of streams.
template <typename Model, typename Loss>
void train(Rank& me, Model& model, const Loss& loss_of, const Training& training = {}) {
  const Tensors params = parameters(*model), tokens = tokens_of(me);
  // Torch's: ours gives neighbours in the CPU's memory to its kernel as one tensor, which rounds
  // the last few elements of odd sizes otherwise.
  torch::optim::AdamW optimizer(params, torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      const bool is_last = micro + 1 == kMicroBatches;
      if (model->is_fully_sharded()) {
        model->set_requires_gradient_sync(is_last || training.syncs_each);
        model->set_is_last_backward(is_last);
      }
      std::optional<NoSync> no_sync;
      if (is_replicated(*model) && !is_last && !training.syncs_each) no_sync.emplace(*model);
      const at::Tensor loss = loss_of(model, tokens[step * kMicroBatches + micro]);
      loss.backward();
      me.found.push_back(loss.detach());
    }
    me.found.push_back(clip_grad_norm_(params, 0.5, {.norm_type = training.norm_type}));
    optimizer.step();
  }
  for (const at::Tensor& param : params) me.found.push_back(full_tensor(param).detach());
}

void train_sharded(Rank& me, const FullyShardOptions& options, const Training& training = {}) {
  Transformer model = testing::make_model(odd_model());
  testing::shard_blocks_and_root(model, options);
  train(me, model, &testing::loss_of, training);
}

void accumulates_reduced(Rank& me) { train_sharded(me, me.options()); }

void accumulates_unreduced(Rank& me) {
  train_sharded(me, me.options(), {.syncs_each = false, .norm_type = INFINITY});
}

void half_precision(Rank& me) {
  FullyShardOptions options = me.options();
  options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  train_sharded(me, options, {.syncs_each = false});
}

// Two by half, or one by all.
FullyShardOptions hybrid_options(const Rank& me) {
  const int64_t world_size = me.group->getSize();
  const int64_t replicas = world_size % 2 == 0 ? 2 : 1;
  FullyShardOptions options = me.options();
  options.mesh =
      init_device_mesh(me.device.type(), {replicas, world_size / replicas}, {"replicate", "shard"});
  return options;
}

void hybrid(Rank& me) { train_sharded(me, hybrid_options(me), {.norm_type = 1}); }

// The all-reduce of the first micro-batch is left to the second.
void hybrid_reduces_later(Rank& me) {
  FullyShardOptions options = hybrid_options(me);
  options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  Transformer model = testing::make_model(odd_model());
  testing::shard_blocks_and_root(model, options);
  int call = 0;
  train(me, model, [&](Transformer& called, const at::Tensor& tokens) {
    called->set_requires_all_reduce(++call % kMicroBatches == 0);
    return testing::loss_of(called, tokens);
  });
}

void checkpoints_by_call(Rank& me) {
  testing::TransformerOptions model_options = odd_model();
  model_options.checkpoint_activations = true;
  Transformer model = testing::make_model(model_options);
  testing::shard_blocks_and_root(model, me.options());
  train(me, model, &testing::loss_of, {.syncs_each = false});
}

void checkpoint_blocks(Rank& me, const CheckpointOptions& options) {
  Transformer model = testing::make_model(odd_model());
  for (auto& block : model->blocks) checkpoint(*block, options);
  testing::shard_blocks_and_root(model, me.options());
  train(me, model, &testing::loss_of);
}

void checkpoints_blocks(Rank& me) { checkpoint_blocks(me, {}); }
void checkpoints_all_of_a_block(Rank& me) { checkpoint_blocks(me, {.early_stop = false}); }
void checkpoints_selectively(Rank& me) {
  checkpoint_blocks(me, {.save_policy = save_matmuls_and_attention()});
}
void offloads_blocks(Rank& me) { checkpoint_blocks(me, {.offload_to_host = true}); }

void offloads_all(Rank& me) {
  testing::TransformerOptions model_options = odd_model();
  model_options.checkpoint_activations = true;  // and the inputs of these go to the host
  Transformer model = testing::make_model(model_options);
  testing::shard_blocks_and_root(model, me.options());
  train(me, model, [](Transformer& called, const at::Tensor& tokens) {
    return offload_activations([&] { return testing::loss_of(called, tokens); });
  });
}

// A linear layer with dropout that draws from a generator, or from its device's default one.
struct NoisyImpl : torch::nn::Module {
  explicit NoisyImpl(std::optional<at::Generator> draws_from) : generator(std::move(draws_from)) {
    linear = register_module("linear", fsdp::nn::Linear(15, 15));
  }
  at::Tensor forward(const at::Tensor& x_BSD) {
    const at::Tensor hidden_BSD = linear(x_BSD);
    const at::Tensor kept_BSD = at::empty_like(hidden_BSD).bernoulli_(0.7, generator);
    return at::gelu(hidden_BSD * kept_BSD.div_(0.7)) + x_BSD;
  }
  std::optional<at::Generator> generator;
  fsdp::nn::Linear linear{nullptr};
};
FSDP_MODULE(Noisy);

struct NoisyModelImpl : torch::nn::Module {
  explicit NoisyModelImpl(const std::optional<at::Generator>& generator) {
    embedding = register_module("embedding", fsdp::nn::Embedding(13, 15));
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(register_module(c10::str("block", i), Noisy(generator)));
    }
    testing::init_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& tokens_BS) {
    at::Tensor x_BSD = embedding(tokens_BS);
    for (int64_t i = 0; i < 3; ++i) {
      if (i != skipped) x_BSD = blocks[i](x_BSD);
    }
    return x_BSD.pow(2).mean();
  }
  fsdp::nn::Embedding embedding{nullptr};
  std::vector<Noisy> blocks;
  int64_t skipped = -1;
};
FSDP_MODULE(NoisyModel);

at::Generator new_generator(const Rank& me) {
  at::Generator generator = me.device.is_cpu() ? at::make_generator<at::CPUGeneratorImpl>()
                                               : at::globalContext()
                                                     .getAcceleratorHooksInterface(me.device.type())
                                                     .getNewGenerator(me.device.index());
  generator.set_current_seed(7 + me.group->getRank());
  return generator;
}

void train_noisy(Rank& me, const std::optional<at::Generator>& generator) {
  NoisyModel model(generator);
  CheckpointOptions options;
  if (generator) options.generators = {*generator};
  checkpoint(*model->blocks[0], options);
  options.save_policy = save_matmuls_and_attention();
  checkpoint(*model->blocks[1], options);
  for (Noisy& block : model->blocks) fully_shard(*block, me.options());
  fully_shard(*model, me.options());
  train(me, model, [](NoisyModel& called, const at::Tensor& tokens) { return called(tokens); });
}

void dropout(Rank& me) {
  const at::Generator generator = new_generator(me);
  train_noisy(me, generator);
  me.found.push_back(generator.get_state());
}

// Replicated by c10d's Reducer, in buckets of a few parameters.
void replicate_and_train(Rank& me, ReplicateOptions options, const Training& training) {
  Transformer model = testing::make_model(odd_model());
  model->to(me.device);
  options.bucket_cap_mb = options.first_bucket_cap_mb = 4096.0 / (1 << 20);
  replicate(*model, options);
  train(me, model, &testing::loss_of, training);
}

void replicates(Rank& me) { replicate_and_train(me, {}, {}); }
void replicates_unreduced(Rank& me) { replicate_and_train(me, {}, {.syncs_each = false}); }
void replicates_into_gradients(Rank& me) {
  replicate_and_train(me, {.gradient_as_bucket_view = false}, {.norm_type = INFINITY});
}
void replicates_static_graph(Rank& me) { replicate_and_train(me, {.static_graph = true}, {}); }

// Each rank and each step leaves one block out.
void replicates_branches(Rank& me) {
  NoisyModel model(new_generator(me));
  model->to(me.device);
  replicate(*model, {.find_unused_parameters = true});
  int64_t call = me.group->getRank();
  train(me, model, [&](NoisyModel& called, const at::Tensor& tokens) {
    called->skipped = call++ % 3;
    return called(tokens);
  });
}

struct Case {
  std::string name;
  void (*run)(Rank&);
};

std::vector<Case> cases() {
  return {{"AccumulatesReduced", &accumulates_reduced},
          {"AccumulatesUnreduced", &accumulates_unreduced},
          {"HalfPrecision", &half_precision},
          {"Hybrid", &hybrid},
          {"HybridReducesLater", &hybrid_reduces_later},
          {"CheckpointsByCall", &checkpoints_by_call},
          {"CheckpointsBlocks", &checkpoints_blocks},
          {"CheckpointsAllOfABlock", &checkpoints_all_of_a_block},
          {"CheckpointsSelectively", &checkpoints_selectively},
          {"OffloadsBlocks", &offloads_blocks},
          {"OffloadsAll", &offloads_all},
          {"Dropout", &dropout}};
}

std::vector<Case> replicated_cases() {
  return {{"Replicates", &replicates},
          {"ReplicatesUnreduced", &replicates_unreduced},
          {"ReplicatesIntoGradients", &replicates_into_gradients},
          {"ReplicatesStaticGraph", &replicates_static_graph},
          {"ReplicatesBranches", &replicates_branches}};
}

struct Run {
  Case training;
  int world_size = 1;
  Layout layout = Layout::kFlat;
  std::optional<Devices> devices;  // unset: the CPU
};

// What each rank kept.
std::vector<Tensors> run(const Run& run) {
  std::vector<Tensors> found(run.world_size);
  testing::run_ranks_on(run.devices, run.world_size, [&](const auto& group, const auto& device) {
    const int rank = group->getRank();
    Rank me{group, device, run.layout, {}};
    run.training.run(me);
    for (const at::Tensor& tensor : me.found) found[rank].push_back(tensor.cpu());
  });
  return found;
}

void expect_equal(const std::vector<Tensors>& found, const std::vector<Tensors>& expected) {
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    ASSERT_EQ(found[rank].size(), expected[rank].size());
    for (size_t i = 0; i < expected[rank].size(); ++i) {
      ASSERT_TRUE(at::equal(found[rank][i], expected[rank][i]))
          << "value " << i << " of rank " << rank << " by "
          << (found[rank][i].to(at::kDouble) - expected[rank][i].to(at::kDouble));
    }
  }
}

void expect_bits_of_the_cpu(Run npu_run) {
  const Devices devices = *npu_run.devices;
  npu_run.devices.reset();
  const std::vector<Tensors> expected = run(npu_run);
  npu_run.devices = devices;
  testing::in_every_execution([&] { expect_equal(run(npu_run), expected); });
}

class NpuTraining : public ::testing::TestWithParam<std::tuple<Case, int, Layout>>,
                    testing::CleanSim {};

class NpuDropout : public testing::LayoutTest, testing::CleanSim {};

TEST_P(NpuTraining, HasTheBitsOfTheCpu) {
  const auto& [training, world_size, layout] = GetParam();
  expect_bits_of_the_cpu({training, world_size, layout, Devices::kOneEach});
  if (world_size == 3) expect_bits_of_the_cpu({training, world_size, layout, Devices::kShared});
}

// Each npu has a default generator, of which checkpoint() saves the state: ranks with an npu each
// draw in backward what they drew in forward. On the CPU they would share one.
TEST_P(NpuDropout, DrawsFromTheDefaultGenerators) {
  constexpr int kWorldSize = 3;
  for (const auto execution : {sim::Execution::kEager, sim::Execution::kLate}) {
    sim::set_execution(execution);
    std::vector<Tensors> of_default(kWorldSize), of_own(kWorldSize);
    testing::run_npu_ranks(kWorldSize, Devices::kOneEach, [&](const auto& group, const auto& npu) {
      Rank own{group, npu, GetParam(), {}}, by_default{group, npu, GetParam(), {}};
      train_noisy(own, new_generator(own));
      at::Generator generator = at::globalContext().defaultGenerator(npu);
      generator.set_current_seed(7 + group->getRank());
      train_noisy(by_default, std::nullopt);
      for (const at::Tensor& x : own.found) of_own[group->getRank()].push_back(x.cpu());
      for (const at::Tensor& x : by_default.found) of_default[group->getRank()].push_back(x.cpu());
    });
    expect_equal(of_default, of_own);
  }
}
FSDP_BOTH_LAYOUTS(NpuDropout);

std::string name_of(const ::testing::TestParamInfo<std::tuple<Case, int, Layout>>& info) {
  return std::get<0>(info.param).name + "_" + std::to_string(std::get<1>(info.param)) + "_" +
         testing::name_of(std::get<2>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Npu, NpuTraining,
                         ::testing::Combine(::testing::ValuesIn(cases()),
                                            ::testing::Values(1, 2, 3, 8), testing::layouts()),
                         name_of);
INSTANTIATE_TEST_SUITE_P(NpuReplicate, NpuTraining,
                         ::testing::Combine(::testing::ValuesIn(replicated_cases()),
                                            ::testing::Values(1, 2, 3, 8),
                                            ::testing::Values(Layout::kFlat)),
                         name_of);

}  // namespace
}  // namespace fsdp
