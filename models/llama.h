#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "fsdp/module.h"
#include "fsdp/nn.h"

/// The Llama decoder as FSDP_MODULEs, with the parameter names and shapes of Hugging Face's
/// LlamaForCausalLM, so that its weights go there and back unchanged.
///
/// Dimensions in names: B batch, T tokens, E hidden size, F intermediate size, H heads, K key-value
/// heads, D size of a head, V vocabulary.
/// Source: transformers 4.57, models/llama/modeling_llama.py.
namespace fsdp::models {

/// The shape of the model, in the field names of Hugging Face's config.json.
struct LlamaConfig {
  int64_t vocab_size = 256;
  int64_t hidden_size = 128;
  int64_t intermediate_size = 384;
  int64_t num_hidden_layers = 4;
  int64_t num_attention_heads = 4;
  int64_t num_key_value_heads = 4;
  int64_t max_position_embeddings = 128;  ///< tokens
  double rms_norm_eps = 1e-5;
  double rope_theta = 10000.0;
  bool tie_word_embeddings = false;
  double initializer_range = 0.02;  ///< standard deviation of the initial weights

  [[nodiscard]] int64_t head_dim() const { return hidden_size / num_attention_heads; }
  /// Errors:  ConfigError names the field that cannot be, or the two that do not fit each other.
  void check() const;
};

/// The angles of the rotary embedding, one row a position.
struct RotaryTables {
  at::Tensor cos_TD;
  at::Tensor sin_TD;
};

/// Shapes:  [num_tokens, head_dim], float; the second half of a row repeats the first (HF's order).
[[nodiscard]] RotaryTables rotary_tables(const LlamaConfig& config, int64_t num_tokens,
                                         const at::Device& device);

/// y = x W^T. In place of nn::Linear, whose constructor draws from the process-wide generator.
class LlamaLinearImpl : public torch::nn::Module {
 public:
  LlamaLinearImpl(int64_t in_features, int64_t out_features);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;
};
FSDP_MODULE(LlamaLinear);

/// x divided by its root mean square over the last dimension, times `weight`.
class LlamaRMSNormImpl : public torch::nn::Module {
 public:
  LlamaRMSNormImpl(int64_t hidden_size, double eps);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;

 private:
  double eps_;
};
FSDP_MODULE(LlamaRMSNorm);

/// Causal self-attention; num_heads / num_key_value_heads heads share a key and a value.
class LlamaAttentionImpl : public torch::nn::Module {
 public:
  explicit LlamaAttentionImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x_BTE, const at::Tensor& cos_TD, const at::Tensor& sin_TD);

  LlamaLinear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};

 private:
  int64_t head_dim_;
  bool grouped_;
};
FSDP_MODULE(LlamaAttention);

/// SwiGLU: down(silu(gate(x)) * up(x)).
class LlamaMLPImpl : public torch::nn::Module {
 public:
  explicit LlamaMLPImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x_BTE);

  LlamaLinear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
FSDP_MODULE(LlamaMLP);

/// One block: the unit to shard.
class LlamaDecoderLayerImpl : public torch::nn::Module {
 public:
  explicit LlamaDecoderLayerImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x_BTE, const at::Tensor& cos_TD, const at::Tensor& sin_TD);

  LlamaAttention self_attn{nullptr};
  LlamaMLP mlp{nullptr};
  LlamaRMSNorm input_layernorm{nullptr}, post_attention_layernorm{nullptr};
};
FSDP_MODULE(LlamaDecoderLayer);

/// Tokens to hidden states.
class LlamaModelImpl : public torch::nn::Module {
 public:
  explicit LlamaModelImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& tokens_BT);

  fsdp::nn::Embedding embed_tokens{nullptr};
  std::vector<LlamaDecoderLayer> layers;  // typed: a call through ModuleList's base runs no hooks
  LlamaRMSNorm norm{nullptr};

 private:
  LlamaConfig config_;
};
FSDP_MODULE(LlamaModel);

/// Tokens to the logits of the token that follows each.
///
/// The weights are not initialised on construction: see initialize().
/// Errors:  the constructor throws LlamaConfig::check()'s; forward throws ConfigError for more
/// tokens
///          than max_position_embeddings.
class LlamaForCausalLMImpl : public torch::nn::Module {
 public:
  explicit LlamaForCausalLMImpl(const LlamaConfig& config);
  /// Shapes:  int64 [B, T] to [B, T, V].
  at::Tensor forward(const at::Tensor& tokens_BT);

  LlamaModel model{nullptr};
  LlamaLinear lm_head{nullptr};
};
FSDP_MODULE(LlamaForCausalLM);

/// Draws every weight anew: matrices from normal(0, initializer_range), norms are one.
///
/// Ranks:   no communication. Every rank that gives a generator of the same seed gets the same
///          weights, whatever else runs: the process-wide generator is not used.
void initialize(LlamaForCausalLM& llama, const LlamaConfig& config, at::Generator generator);

}  // namespace fsdp::models
