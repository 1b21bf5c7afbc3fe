// Every module of torch::nn that has parameters, hooked: it computes what the plain one computes,
// hooks see its tensors, and what they replace is what it computes with.

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/types.h>

#include "fsdp/nn.h"
#include "module/recording_hooks.h"

namespace fsdp {
namespace {

using at::Tensor;
using testing::calls;
using testing::HookEvents;
using testing::record;

using Tensors = std::vector<Tensor>;

template <class T>
Tensors tensors_in(T value) {
  TensorRefs refs;
  collect_tensors(value, refs);
  Tensors tensors;
  for (const Tensor* tensor : refs) tensors.push_back(*tensor);
  return tensors;
}

void expect_equal(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  ASSERT_GT(expected.size(), 0u);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(actual[i], expected[i])) << "result tensor " << i;
  }
}

/// Doubles the floating-point tensors, as the hooks of this test do.
void double_tensors(TensorRefs refs) {
  for (Tensor* tensor : refs) {
    if (tensor->is_floating_point()) *tensor = *tensor * 2;
  }
}
template <class T>
T doubled(T value) {
  TensorRefs refs;
  collect_tensors(value, refs);
  double_tensors(refs);
  return value;
}

/// Gives `plain` the parameters of `hooked`. No dropout, and no change of running statistics.
void make_comparable(torch::nn::Module& hooked, torch::nn::Module& plain) {
  EXPECT_GT(hooked.parameters().size(), 0u);
  auto parameters = plain.named_parameters();
  for (const auto& item : hooked.named_parameters()) parameters[item.key()].copy_(item.value());
  hooked.eval();
  plain.eval();
}

/// Checks `hooked` against `plain`, the same module of torch::nn, for a forward of `args`. What
/// need not be a template is none: there are forty instances.
template <class Holder, class Plain, class... A>
void expect_hooked(const char* name, Holder hooked, Plain plain, const A&... args) {
  const ::testing::ScopedTrace trace(__FILE__, __LINE__, name);
  const torch::NoGradGuard no_grad;
  make_comparable(*hooked, *plain);
  const Tensors expected = tensors_in(plain->forward(args...));
  const Tensors expected_of_doubled = tensors_in(plain->forward(doubled(args)...));
  const size_t num_inputs = (tensors_in(args).size() + ...);
  expect_equal(tensors_in(hooked(args...)), expected);

  const auto hooks = record(hooked);
  expect_equal(tensors_in(hooked(args...)), expected);
  expect_equal(tensors_in(hooked->forward(args...)), expected);
  torch::nn::AnyModule(hooked).any_forward(args...);
  EXPECT_EQ(hooks->take(), calls(3, num_inputs, expected.size()));

  hooks->input_factor = 2;
  expect_equal(tensors_in(hooked(args...)), expected_of_doubled);
  hooks->output_factor = 2;
  expect_equal(tensors_in(hooked(args...)), doubled(expected_of_doubled));
  EXPECT_EQ(hooks->take(), calls(2, num_inputs, expected.size()));
}

#define EXPECT_HOOKED(Name, constructor_arguments, ...)                                       \
  expect_hooked(#Name, nn::Name constructor_arguments, torch::nn::Name constructor_arguments, \
                __VA_ARGS__)

class HookedNnTest : public ::testing::Test {
 protected:
  HookedNnTest() { torch::manual_seed(0); }
  // B batch, T time, D width, L, H, W lengths of an image.
  const Tensor x_BD = at::rand({4, 8}), x_TBD = at::rand({3, 2, 8}), x_BDL = at::rand({2, 8, 5}),
               x_BDHW = at::rand({2, 8, 5, 5}), x_BDLHW = at::rand({2, 8, 5, 5, 5}),
               indices = at::tensor({3, 1, 2});
};

TEST_F(HookedNnTest, LinearAndEmbedding) {
  EXPECT_HOOKED(Linear, (8, 3), x_BD);
  EXPECT_HOOKED(Linear, (torch::nn::LinearOptions(8, 3).bias(false)), x_BD);
  EXPECT_HOOKED(Bilinear, (8, 8, 3), x_BD, x_BD);
  EXPECT_HOOKED(Embedding, (5, 8), indices);
  EXPECT_HOOKED(EmbeddingBag, (5, 8), indices, at::tensor({0, 2}));
  EXPECT_HOOKED(EmbeddingBag, (5, 8), indices.view({1, 3}));
  EXPECT_HOOKED(PReLU, (), x_BD);
  EXPECT_HOOKED(AdaptiveLogSoftmaxWithLoss,
                (torch::nn::AdaptiveLogSoftmaxWithLossOptions(8, 6, {2, 4}).div_value(2)), x_BD,
                at::tensor({0, 5, 2, 3}));
}

TEST_F(HookedNnTest, Norms) {
  using torch::nn::InstanceNormOptions;
  EXPECT_HOOKED(LayerNorm, (torch::nn::LayerNormOptions({8})), x_BD);
  EXPECT_HOOKED(GroupNorm, (torch::nn::GroupNormOptions(2, 8)), x_BD);
  EXPECT_HOOKED(BatchNorm1d, (8), x_BD);
  EXPECT_HOOKED(BatchNorm2d, (8), x_BDHW);
  EXPECT_HOOKED(BatchNorm3d, (8), x_BDLHW);
  EXPECT_HOOKED(InstanceNorm1d, (InstanceNormOptions(8).affine(true)), x_BDL);
  EXPECT_HOOKED(InstanceNorm2d, (InstanceNormOptions(8).affine(true)), x_BDHW);
  EXPECT_HOOKED(InstanceNorm3d, (InstanceNormOptions(8).affine(true)), x_BDLHW);
}

TEST_F(HookedNnTest, Convolutions) {
  EXPECT_HOOKED(Conv1d, (8, 4, 3), x_BDL);
  EXPECT_HOOKED(Conv2d, (8, 4, 3), x_BDHW);
  EXPECT_HOOKED(Conv3d, (8, 4, 3), x_BDLHW);
  EXPECT_HOOKED(ConvTranspose1d, (8, 4, 3), x_BDL);
  EXPECT_HOOKED(ConvTranspose2d, (8, 4, 3), x_BDHW);
  EXPECT_HOOKED(ConvTranspose3d, (8, 4, 3), x_BDLHW);
}

TEST_F(HookedNnTest, Recurrent) {
  const Tensor hidden = at::rand({1, 2, 8});
  const auto lstm_state = std::optional(std::tuple(hidden, hidden + 1));
  const auto cell_state = std::optional(std::tuple(hidden[0], hidden[0] + 1));
  EXPECT_HOOKED(RNN, (8, 8), x_TBD);
  EXPECT_HOOKED(RNN, (8, 8), x_TBD, hidden);
  EXPECT_HOOKED(GRU, (8, 8), x_TBD);
  EXPECT_HOOKED(LSTM, (torch::nn::LSTMOptions(8, 8).num_layers(2)), x_TBD);
  EXPECT_HOOKED(LSTM, (8, 8), x_TBD, lstm_state);
  EXPECT_HOOKED(RNNCell, (8, 8), x_TBD[0]);
  EXPECT_HOOKED(GRUCell, (8, 8), x_TBD[0], hidden[0]);
  EXPECT_HOOKED(LSTMCell, (8, 8), x_TBD[0]);
  EXPECT_HOOKED(LSTMCell, (8, 8), x_TBD[0], cell_state);
}

TEST_F(HookedNnTest, Attention) {
  using torch::nn::TransformerDecoderLayerOptions;
  using torch::nn::TransformerEncoderLayerOptions;
  const Tensor mask_TT = at::triu(at::full({3, 3}, -1e9), 1);
  EXPECT_HOOKED(MultiheadAttention, (8, 2), x_TBD, x_TBD, x_TBD);
  EXPECT_HOOKED(MultiheadAttention, (8, 2), x_TBD, x_TBD, x_TBD, Tensor(), false, mask_TT);
  EXPECT_HOOKED(TransformerEncoderLayer, (8, 2), x_TBD);
  EXPECT_HOOKED(TransformerEncoderLayer, (8, 2), x_TBD, mask_TT);
  EXPECT_HOOKED(TransformerDecoderLayer, (8, 2), x_TBD, x_TBD);
  EXPECT_HOOKED(TransformerEncoder,
                (torch::nn::TransformerEncoderOptions(TransformerEncoderLayerOptions(8, 2), 2)),
                x_TBD);
  EXPECT_HOOKED(TransformerDecoder,
                (torch::nn::TransformerDecoderOptions(TransformerDecoderLayerOptions(8, 2), 2)),
                x_TBD, x_TBD);
  EXPECT_HOOKED(Transformer,
                (torch::nn::TransformerOptions(8, 2).num_encoder_layers(1).num_decoder_layers(1)),
                x_TBD, x_TBD);
}

// Promise: a composite module of torch runs its hooks once, whatever it makes of its children,
// which run none. [Note: composite modules of torch]
TEST_F(HookedNnTest, ACompositeModuleIsOneCall) {
  nn::TransformerEncoderLayer hooked_layer(8, 2);
  nn::TransformerEncoder encoder(
      torch::nn::TransformerEncoderLayer(
          std::shared_ptr<torch::nn::TransformerEncoderLayerImpl>(hooked_layer.ptr())),
      2);
  const auto hooks = record(encoder);
  for (const auto& module : encoder->modules(/*include_self=*/false)) {
    if (auto* hooked = dynamic_cast<FSDPModule*>(module.get())) hooked->set_forward_hooks(hooks);
  }
  EXPECT_EQ(encoder(x_TBD).sizes(), x_TBD.sizes());
  EXPECT_EQ(hooks->take(), calls(1, 1, 1));
}

TEST_F(HookedNnTest, EmbeddingsFromPretrainedWeights) {
  const Tensor weights = at::rand({5, 8});
  using torch::nn::EmbeddingFromPretrainedOptions;
  nn::Embedding frozen = nn::Embedding::from_pretrained(weights);
  EXPECT_FALSE(frozen->weight.requires_grad());
  EXPECT_TRUE(at::equal(frozen(indices), weights.index({indices})));
  EXPECT_TRUE(
      nn::Embedding::from_pretrained(weights, EmbeddingFromPretrainedOptions().freeze(false))
          ->weight.requires_grad());
  nn::EmbeddingBag bag = nn::EmbeddingBag::from_pretrained(weights);
  EXPECT_FALSE(bag->weight.requires_grad());
  EXPECT_TRUE(at::equal(bag->weight, weights));
}

// Promise: the modules without parameters can be called as plain ones; a few stand for all.
TEST_F(HookedNnTest, ModulesWithoutParameters) {
  nn::Identity identity;
  nn::ReLU relu;
  nn::Functional doubling([](const Tensor& x) { return x * 2; });
  nn::Dropout dropout(0.5);
  nn::Flatten flatten;
  dropout->eval();
  const auto hooks = record(identity);
  relu->set_forward_hooks(hooks);
  doubling->set_forward_hooks(hooks);
  dropout->set_forward_hooks(hooks);
  flatten->set_forward_hooks(hooks);
  EXPECT_TRUE(at::equal(flatten(dropout(doubling(relu(identity(-x_BD))))), at::zeros_like(x_BD)));
  EXPECT_EQ(hooks->take(), calls(5, 1, 1));
}

// ---- Sequential

TEST_F(HookedNnTest, SequentialRunsItsOwnHooksAndThoseOfItsChildren) {
  nn::Linear up(8, 16), down(16, 8);
  nn::Sequential chain(up, torch::nn::ReLU(), down);
  chain->push_back("out", nn::Linear(8, 4));
  EXPECT_EQ(chain->size(), 4u);
  EXPECT_EQ(chain->named_parameters().keys().back(), "out.bias");
  const Tensor expected_of_doubled = chain(x_BD * 2);

  const auto outer = record(chain), inner = record(up);
  down->set_forward_hooks(inner);
  outer->input_factor = 2;
  EXPECT_TRUE(at::equal(chain(x_BD), expected_of_doubled));
  EXPECT_TRUE(at::equal(chain->forward(x_BD), expected_of_doubled));
  EXPECT_EQ(outer->take(), calls(2, 1, 1));
  EXPECT_EQ(inner->take(), calls(4, 1, 1));

  torch::nn::Sequential plain_chain(up, torch::nn::ReLU(), down);
  plain_chain->forward(x_BD);
  EXPECT_EQ(inner->take(), calls(2, 1, 1)) << "in a Sequential of torch";
}

TEST_F(HookedNnTest, SequentialReturnsAnyResult) {
  using LSTMResult = std::tuple<Tensor, std::tuple<Tensor, Tensor>>;
  nn::Sequential chain(nn::Linear(8, 8), nn::LSTM(8, 8));
  const auto hooks = record(chain);
  hooks->output_factor = 2;
  const LSTMResult result = chain->forward<LSTMResult>(x_TBD);
  EXPECT_EQ(hooks->take(), calls(1, 1, 3));
  hooks->output_factor = 1;
  expect_equal(tensors_in(result), tensors_in(doubled(chain->forward<LSTMResult>(x_TBD))));
  hooks->take();

  EXPECT_THROW(chain->forward(x_TBD), c10::Error) << "the result is no Tensor";
  EXPECT_EQ(hooks->take(), (HookEvents{1, 0, 1, 1, 0}));

  nn::Sequential multiple_inputs(nn::Bilinear(8, 8, 3), nn::Tanh());
  multiple_inputs->set_forward_hooks(hooks);
  multiple_inputs(x_BD, x_BD);
  EXPECT_EQ(hooks->take(), calls(1, 2, 1));
}

TEST_F(HookedNnTest, SequentialIsConstructedNamedClonedAndPrinted) {
  nn::Sequential chain({{"up", nn::Linear(8, 16)}, {"down", torch::nn::Linear(16, 8)}});
  EXPECT_EQ(chain->named_children().keys(), std::vector<std::string>({"up", "down"}));
  nn::Sequential empty;
  EXPECT_TRUE(empty->is_empty());
  EXPECT_TRUE(nn::Sequential(nullptr).ModuleHolder::is_empty());
  const nn::Sequential same = chain;
  EXPECT_EQ(same.get(), chain.get());

  nn::Sequential clone(std::dynamic_pointer_cast<torch::nn::SequentialImpl>(chain->clone()));
  EXPECT_TRUE(at::equal(clone(x_BD), chain(x_BD)));
  EXPECT_FALSE(clone->parameters()[0].is_alias_of(chain->parameters()[0]));
  const auto hooks = record(clone);
  clone->at<nn::Linear::ContainedType>(0).set_forward_hooks(hooks);
  clone(x_BD);
  EXPECT_EQ(hooks->take(), calls(2, 1, 1));

  std::ostringstream printed;
  printed << chain;
  EXPECT_EQ(printed.str().find("Hooked"), std::string::npos) << printed.str();
}

TEST_F(HookedNnTest, ClonesOfNnModulesAreHooked) {
  nn::Linear linear(8, 8);
  nn::Linear clone(std::dynamic_pointer_cast<torch::nn::LinearImpl>(linear->clone()));
  EXPECT_TRUE(clone->weight.is_same(clone->parameters()[0]));
  EXPECT_FALSE(clone->weight.is_alias_of(linear->weight));
  const auto hooks = record(clone);
  EXPECT_TRUE(at::equal(clone(x_BD), linear(x_BD)));
  EXPECT_EQ(hooks->take(), calls(1, 1, 1));
}

}  // namespace
}  // namespace fsdp
