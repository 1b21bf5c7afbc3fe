#include "models/llama.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "fsdp/error.h"
#include "train/export.h"

// B batch, T tokens, E hidden size, H heads, D size of a head, V vocabulary.
namespace fsdp::models {
namespace {

LlamaConfig small_config() {
  LlamaConfig config;
  config.vocab_size = 11;
  config.hidden_size = 12;
  config.intermediate_size = 20;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 2;
  config.max_position_embeddings = 9;
  config.rope_theta = 50;
  config.initializer_range = 0.5;  // large, so that attention and rotation show in the logits
  return config;
}

LlamaForCausalLM make(const LlamaConfig& config, uint64_t seed = 3) {
  LlamaForCausalLM llama(config);
  initialize(llama, config, at::make_generator<at::CPUGeneratorImpl>(seed));
  const torch::NoGradGuard no_grad;
  for (const auto& item : llama->named_parameters()) {  // norms of one would hide a missing factor
    at::Tensor weight = item.value();
    if (weight.dim() == 1) weight.copy_(torch::linspace(0.5, 1.5, weight.size(0)));
  }
  return llama;
}

using Weights = std::map<std::string, at::Tensor>;

Weights weights_of(const LlamaForCausalLM& llama) {
  Weights weights;
  for (const auto& item : llama->named_parameters()) {
    weights[item.key()] = item.value().detach().to(at::kDouble);
  }
  return weights;
}

at::Tensor reference_norm(const at::Tensor& x_TE, const at::Tensor& weight, double eps) {
  return x_TE / (x_TE * x_TE).mean(1, /*keepdim=*/true).add(eps).sqrt() * weight;
}

/// Turns each pair (i, i + D/2) of the head by position / theta^(2i/D), one number at a time.
at::Tensor reference_rotation(const at::Tensor& x_TD, double theta) {
  const int64_t num_tokens = x_TD.size(0), half = x_TD.size(1) / 2;
  const at::Tensor out_TD = torch::empty_like(x_TD);
  const auto x = x_TD.accessor<double, 2>();
  auto out = out_TD.accessor<double, 2>();
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = t / std::pow(theta, static_cast<double>(i) / half);
      out[t][i] = x[t][i] * std::cos(angle) - x[t][i + half] * std::sin(angle);
      out[t][i + half] = x[t][i + half] * std::cos(angle) + x[t][i] * std::sin(angle);
    }
  }
  return out_TD;
}

/// One sequence through the model, written out in double: a loop over heads, a mask and a softmax.
at::Tensor reference_logits(const LlamaConfig& config, Weights w, const at::Tensor& tokens_T) {
  const int64_t head_dim = config.head_dim(), num_tokens = tokens_T.size(0);
  const at::Tensor future_TT =
      torch::ones({num_tokens, num_tokens}, at::kBool).triu(/*diagonal=*/1);
  at::Tensor x_TE = w["model.embed_tokens.weight"].index_select(0, tokens_T);
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const auto apply = [&](const std::string& name, const at::Tensor& x) {
      return x.matmul(w.at(prefix + name + ".weight").t());
    };
    const at::Tensor a_TE =
        reference_norm(x_TE, w.at(prefix + "input_layernorm.weight"), config.rms_norm_eps);
    const at::Tensor q = apply("self_attn.q_proj", a_TE), k = apply("self_attn.k_proj", a_TE),
                     v = apply("self_attn.v_proj", a_TE);
    std::vector<at::Tensor> heads;
    for (int64_t head = 0; head < config.num_attention_heads; ++head) {
      const int64_t kv_head =
          head / (config.num_attention_heads / config.num_key_value_heads) * head_dim;
      const at::Tensor q_TD =
          reference_rotation(q.narrow(1, head * head_dim, head_dim), config.rope_theta);
      const at::Tensor k_TD = reference_rotation(k.narrow(1, kv_head, head_dim), config.rope_theta);
      at::Tensor score_TT = q_TD.matmul(k_TD.t()) / std::sqrt(static_cast<double>(head_dim));
      score_TT = score_TT.masked_fill(future_TT, -INFINITY).softmax(1);
      heads.push_back(score_TT.matmul(v.narrow(1, kv_head, head_dim)));
    }
    x_TE = x_TE + apply("self_attn.o_proj", torch::cat(heads, 1));
    const at::Tensor m_TE =
        reference_norm(x_TE, w.at(prefix + "post_attention_layernorm.weight"), config.rms_norm_eps);
    const at::Tensor gate = apply("mlp.gate_proj", m_TE);
    x_TE = x_TE + apply("mlp.down_proj", gate * gate.sigmoid() * apply("mlp.up_proj", m_TE));
  }
  return reference_norm(x_TE, w["model.norm.weight"], config.rms_norm_eps)
      .matmul(w["lm_head.weight"].t());
}

// Promise: names, shapes and their order are those of Hugging Face's LlamaForCausalLM.
TEST(LlamaTest, HasTheParametersOfHuggingFace) {
  const std::vector<std::pair<std::string, std::vector<int64_t>>> layer = {
      {"self_attn.q_proj.weight", {12, 12}},    {"self_attn.k_proj.weight", {4, 12}},
      {"self_attn.v_proj.weight", {4, 12}},     {"self_attn.o_proj.weight", {12, 12}},
      {"mlp.gate_proj.weight", {20, 12}},       {"mlp.up_proj.weight", {20, 12}},
      {"mlp.down_proj.weight", {12, 20}},       {"input_layernorm.weight", {12}},
      {"post_attention_layernorm.weight", {12}}};
  std::vector<std::pair<std::string, std::vector<int64_t>>> expected = {
      {"model.embed_tokens.weight", {11, 12}}};
  for (const std::string prefix : {"model.layers.0.", "model.layers.1."}) {
    for (const auto& [name, shape] : layer) expected.emplace_back(prefix + name, shape);
  }
  expected.emplace_back("model.norm.weight", std::vector<int64_t>{12});
  expected.emplace_back("lm_head.weight", std::vector<int64_t>{11, 12});

  const auto names_of = [](const LlamaConfig& config) {
    std::vector<std::pair<std::string, std::vector<int64_t>>> found;
    for (const auto& [name, tensor] : train::unique_parameters(*LlamaForCausalLM(config))) {
      found.emplace_back(name, tensor.sizes().vec());
    }
    return found;
  };
  LlamaConfig config = small_config();
  EXPECT_EQ(names_of(config), expected);
  config.tie_word_embeddings = true;
  expected.pop_back();  // Hugging Face stores a tied weight once, under the embedding's name
  EXPECT_EQ(names_of(config), expected);
}

struct Variant {
  int64_t num_key_value_heads;
  bool tied;
};
class LlamaForwardTest : public ::testing::TestWithParam<Variant> {};

// Promise: the logits are those of the architecture written out one head and one pair at a time.
TEST_P(LlamaForwardTest, EqualsTheSlowForm) {
  LlamaConfig config = small_config();
  config.num_key_value_heads = GetParam().num_key_value_heads;
  config.tie_word_embeddings = GetParam().tied;
  LlamaForCausalLM llama = make(config);
  const Weights weights = weights_of(llama);
  EXPECT_EQ(llama->lm_head->weight.is_same(llama->model->embed_tokens->weight), GetParam().tied);
  for (const int64_t num_tokens : {1, 5, 9}) {
    const at::Tensor tokens_BT = torch::arange(2 * num_tokens).mul(7).remainder(11).view({2, -1});
    const at::Tensor logits_BTV = llama(tokens_BT);
    ASSERT_EQ(logits_BTV.sizes().vec(), (std::vector<int64_t>{2, num_tokens, 11}));
    for (int64_t b = 0; b < 2; ++b) {
      const at::Tensor expected_TV = reference_logits(config, weights, tokens_BT[b]);
      EXPECT_GT(expected_TV.std().item<double>(), 0.5) << "too small to see an error";
      // float against double: 2^-24 a rounding, some hundred of them in a row, logits of about 5.
      EXPECT_TRUE(torch::allclose(logits_BTV[b].to(at::kDouble), expected_TV, /*rtol=*/0, 5e-5))
          << (logits_BTV[b] - expected_TV).abs().max();
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Heads, LlamaForwardTest,
                         ::testing::Values(Variant{6, false},   // every head its own key
                                           Variant{2, false},   // three share one
                                           Variant{1, false},   // all share one
                                           Variant{2, true}));  // one matrix in and out

// Promise: a token changes the logits at its place and after it, and none before.
TEST(LlamaTest, IsCausal) {
  LlamaForCausalLM llama = make(small_config());
  const at::Tensor tokens_BT = torch::tensor({{1, 2, 3, 4, 5, 6}});
  const at::Tensor changed_BT = torch::tensor({{1, 2, 3, 9, 5, 6}});
  const at::Tensor before_BTV = llama(tokens_BT), after_BTV = llama(changed_BT);
  EXPECT_TRUE(at::equal(before_BTV.narrow(1, 0, 3), after_BTV.narrow(1, 0, 3)));
  for (int64_t t = 3; t < 6; ++t) {
    EXPECT_FALSE(torch::allclose(before_BTV.select(1, t), after_BTV.select(1, t))) << t;
  }
}

// Promise: the seed alone decides the weights, and the process-wide generator is not touched.
TEST(LlamaTest, InitialisesFromTheGivenGeneratorAlone) {
  const LlamaConfig config = small_config();
  const at::Tensor state = at::detail::getDefaultCPUGenerator().get_state();
  LlamaForCausalLM llama(config), again(config), other(config);
  initialize(llama, config, at::make_generator<at::CPUGeneratorImpl>(1));
  initialize(again, config, at::make_generator<at::CPUGeneratorImpl>(1));
  initialize(other, config, at::make_generator<at::CPUGeneratorImpl>(2));
  EXPECT_TRUE(at::equal(at::detail::getDefaultCPUGenerator().get_state(), state));
  const Weights a = weights_of(llama), b = weights_of(again), c = weights_of(other);
  for (const auto& [name, weight] : a) {
    EXPECT_TRUE(at::equal(weight, b.at(name))) << name;
    if (weight.dim() == 2) {
      EXPECT_FALSE(at::equal(weight, c.at(name))) << name;
    } else {
      EXPECT_TRUE(at::equal(weight, torch::ones_like(weight))) << name;
    }
  }
  // 1,628 numbers: the deviation of their deviation is 0.5 / sqrt(2 x 1628) = 0.009.
  std::vector<at::Tensor> matrices;
  for (const auto& [name, weight] : a) {
    if (weight.dim() == 2) matrices.push_back(weight.flatten());
  }
  const at::Tensor numbers = torch::cat(matrices);
  EXPECT_NEAR(numbers.std().item<double>(), 0.5, 5 * 0.009);
  EXPECT_NEAR(numbers.mean().item<double>(), 0.0, 5 * 0.5 / std::sqrt(numbers.numel()));
}

// Promise: a model that cannot be is refused with the fields that do not fit.
TEST(LlamaTest, RefusesConfigs) {
  const auto refusal = [](const auto& change) -> std::string {
    LlamaConfig config = small_config();
    change(config);
    try {
      const LlamaForCausalLM llama(config);
    } catch (const ConfigError& error) {
      return message_of(error);
    }
    return "accepted";
  };
  EXPECT_EQ(refusal([](LlamaConfig& c) { c.vocab_size = 0; }),
            "LlamaConfig: vocab_size must be positive, but is 0.");
  EXPECT_EQ(refusal([](LlamaConfig& c) { c.rope_theta = -1; }),
            "LlamaConfig: rope_theta must be positive, but is -1.");
  EXPECT_EQ(refusal([](LlamaConfig& c) { c.hidden_size = 13; }),
            "LlamaConfig: hidden_size 13 is not a multiple of num_attention_heads 6.");
  EXPECT_NE(refusal([](LlamaConfig& c) { c.hidden_size = 18; }).find("must be even"),
            std::string::npos);
  EXPECT_NE(refusal([](LlamaConfig& c) {
              c.num_key_value_heads = 4;
            }).find("num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
            std::string::npos);

  LlamaForCausalLM llama = make(small_config());
  try {
    llama(torch::zeros({1, 10}, at::kLong));
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_EQ(message_of(error),
              "LlamaModel: a sequence of 10 tokens is longer than the 9 of "
              "max_position_embeddings.");
  }
}

}  // namespace
}  // namespace fsdp::models
