#include "models/llama.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <torch/utils.h>

#include "fsdp/error.h"
#include "fsdp/fully_shard.h"

// B batch, T tokens, E hidden size, F intermediate size, H heads, K key-value heads, D size of a
// head, V vocabulary.
namespace fsdp::models {
namespace {

at::Tensor rotate_half(const at::Tensor& x_BHTD) {
  const auto halves = x_BHTD.chunk(2, /*dim=*/-1);
  return at::cat({-halves[1], halves[0]}, /*dim=*/-1);
}

at::Tensor rotate(const at::Tensor& x_BHTD, const at::Tensor& cos_TD, const at::Tensor& sin_TD) {
  return x_BHTD * cos_TD + rotate_half(x_BHTD) * sin_TD;
}

}  // namespace

void LlamaConfig::check() const {
  const auto positive = [](const char* name, auto value) {
    FSDP_CHECK(ConfigError, value > 0, "LlamaConfig: ", name, " must be positive, but is ", value,
               ".");
  };
  positive("vocab_size", vocab_size);
  positive("hidden_size", hidden_size);
  positive("intermediate_size", intermediate_size);
  positive("num_hidden_layers", num_hidden_layers);
  positive("num_attention_heads", num_attention_heads);
  positive("num_key_value_heads", num_key_value_heads);
  positive("max_position_embeddings", max_position_embeddings);
  positive("rms_norm_eps", rms_norm_eps);
  positive("rope_theta", rope_theta);
  positive("initializer_range", initializer_range);
  FSDP_CHECK(ConfigError, hidden_size % num_attention_heads == 0, "LlamaConfig: hidden_size ",
             hidden_size, " is not a multiple of num_attention_heads ", num_attention_heads, ".");
  FSDP_CHECK(ConfigError, head_dim() % 2 == 0, "LlamaConfig: hidden_size ", hidden_size, " over ",
             num_attention_heads, " heads gives a head of ", head_dim(),
             " features; rotary embeddings turn pairs, so it must be even.");
  FSDP_CHECK(ConfigError, num_attention_heads % num_key_value_heads == 0,
             "LlamaConfig: num_attention_heads ", num_attention_heads,
             " is not a multiple of num_key_value_heads ", num_key_value_heads,
             ": each key-value head serves the same number of heads.");
}

RotaryTables rotary_tables(const LlamaConfig& config, int64_t num_tokens,
                           const at::Device& device) {
  const auto options = at::TensorOptions(device).dtype(at::kFloat);
  const int64_t head_dim = config.head_dim();
  const at::Tensor exponents = at::arange(0, head_dim, 2, options) / head_dim;
  const at::Tensor frequencies = at::pow(config.rope_theta, exponents).reciprocal();
  const at::Tensor angles = at::outer(at::arange(num_tokens, options), frequencies);
  const at::Tensor angles_TD = at::cat({angles, angles}, /*dim=*/-1);
  return {.cos_TD = angles_TD.cos(), .sin_TD = angles_TD.sin()};
}

LlamaLinearImpl::LlamaLinearImpl(int64_t in_features, int64_t out_features)
    : weight(register_parameter("weight", at::empty({out_features, in_features}))) {}

at::Tensor LlamaLinearImpl::forward(const at::Tensor& x) { return at::linear(x, weight); }

LlamaRMSNormImpl::LlamaRMSNormImpl(int64_t hidden_size, double eps)
    : weight(register_parameter("weight", at::empty({hidden_size}))), eps_(eps) {}

at::Tensor LlamaRMSNormImpl::forward(const at::Tensor& x) {
  return at::rms_norm(x, {x.size(-1)}, weight, eps_);
}

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaConfig& config)
    : head_dim_(config.head_dim()),
      grouped_(config.num_key_value_heads != config.num_attention_heads) {
  const int64_t q_features = config.num_attention_heads * head_dim_;
  const int64_t kv_features = config.num_key_value_heads * head_dim_;
  q_proj = register_module("q_proj", LlamaLinear(config.hidden_size, q_features));
  k_proj = register_module("k_proj", LlamaLinear(config.hidden_size, kv_features));
  v_proj = register_module("v_proj", LlamaLinear(config.hidden_size, kv_features));
  o_proj = register_module("o_proj", LlamaLinear(q_features, config.hidden_size));
}

at::Tensor LlamaAttentionImpl::forward(const at::Tensor& x_BTE, const at::Tensor& cos_TD,
                                       const at::Tensor& sin_TD) {
  const auto split_heads = [&](const at::Tensor& y) {
    return y.view({y.size(0), y.size(1), -1, head_dim_}).transpose(1, 2);
  };
  const at::Tensor q_BHTD = rotate(split_heads(q_proj(x_BTE)), cos_TD, sin_TD);
  const at::Tensor k_BKTD = rotate(split_heads(k_proj(x_BTE)), cos_TD, sin_TD);
  const at::Tensor v_BKTD = split_heads(v_proj(x_BTE));
  const at::Tensor y_BHTD = at::scaled_dot_product_attention(
      q_BHTD, k_BKTD, v_BKTD, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true,
      /*scale=*/std::nullopt, /*enable_gqa=*/grouped_);
  return o_proj(y_BHTD.transpose(1, 2).flatten(2));
}

LlamaMLPImpl::LlamaMLPImpl(const LlamaConfig& config) {
  const int64_t hidden = config.hidden_size;
  const int64_t intermediate = config.intermediate_size;
  gate_proj = register_module("gate_proj", LlamaLinear(hidden, intermediate));
  up_proj = register_module("up_proj", LlamaLinear(hidden, intermediate));
  down_proj = register_module("down_proj", LlamaLinear(intermediate, hidden));
}

at::Tensor LlamaMLPImpl::forward(const at::Tensor& x_BTE) {
  const at::Tensor h_BTF = at::silu(gate_proj(x_BTE)) * up_proj(x_BTE);
  return down_proj(h_BTF);
}

LlamaDecoderLayerImpl::LlamaDecoderLayerImpl(const LlamaConfig& config) {
  self_attn = register_module("self_attn", LlamaAttention(config));
  mlp = register_module("mlp", LlamaMLP(config));
  input_layernorm =
      register_module("input_layernorm", LlamaRMSNorm(config.hidden_size, config.rms_norm_eps));
  post_attention_layernorm = register_module("post_attention_layernorm",
                                             LlamaRMSNorm(config.hidden_size, config.rms_norm_eps));
}

at::Tensor LlamaDecoderLayerImpl::forward(const at::Tensor& x_BTE, const at::Tensor& cos_TD,
                                          const at::Tensor& sin_TD) {
  const at::Tensor h_BTE = x_BTE + self_attn(input_layernorm(x_BTE), cos_TD, sin_TD);
  return h_BTE + mlp(post_attention_layernorm(h_BTE));
}

LlamaModelImpl::LlamaModelImpl(const LlamaConfig& config) : config_(config) {
  // A given weight keeps Embedding's constructor from drawing from the process-wide generator.
  const auto embedding = torch::nn::EmbeddingOptions(config.vocab_size, config.hidden_size)
                             ._weight(at::empty({config.vocab_size, config.hidden_size}));
  embed_tokens = register_module("embed_tokens", fsdp::nn::Embedding(embedding));
  torch::nn::ModuleList list;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    layers.emplace_back(config);
    list->push_back(layers.back());
  }
  register_module("layers", list);
  norm = register_module("norm", LlamaRMSNorm(config.hidden_size, config.rms_norm_eps));
}

at::Tensor LlamaModelImpl::forward(const at::Tensor& tokens_BT) {
  const int64_t num_tokens = tokens_BT.size(1);
  FSDP_CHECK(ConfigError, num_tokens <= config_.max_position_embeddings,
             "LlamaModel: a sequence of ", num_tokens, " tokens is longer than the ",
             config_.max_position_embeddings, " of max_position_embeddings.");
  const auto [cos_TD, sin_TD] = rotary_tables(config_, num_tokens, tokens_BT.device());
  at::Tensor x_BTE = embed_tokens(tokens_BT);
  for (LlamaDecoderLayer& layer : layers) x_BTE = layer(x_BTE, cos_TD, sin_TD);
  return norm(x_BTE);
}

LlamaForCausalLMImpl::LlamaForCausalLMImpl(const LlamaConfig& config) {
  config.check();
  model = register_module("model", LlamaModel(config));
  lm_head = register_module("lm_head", LlamaLinear(config.hidden_size, config.vocab_size));
  if (config.tie_word_embeddings) {
    fsdp::tie(*model->embed_tokens, model->embed_tokens->weight, *lm_head, lm_head->weight);
  }
}

at::Tensor LlamaForCausalLMImpl::forward(const at::Tensor& tokens_BT) {
  const at::Tensor x_BTE = model(tokens_BT);
  return lm_head(x_BTE);
}

void initialize(LlamaForCausalLM& llama, const LlamaConfig& config, at::Generator generator) {
  const torch::NoGradGuard no_grad;
  for (const auto& item : llama->named_parameters()) {
    at::Tensor weight = item.value();
    if (weight.dim() == 1) {
      weight.fill_(1.0);
    } else {
      weight.normal_(0.0, config.initializer_range, generator);
    }
  }
}

}  // namespace fsdp::models
