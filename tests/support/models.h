#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "fsdp/module.h"
#include "fsdp/nn.h"

// The small models of FSDP2's own tests, and parameters that are hard to cut.
// B batch, S sequence, D dim, V vocabulary.
namespace fsdp::testing {

/// Linear, relu, linear, relu.
struct MLPImpl : torch::nn::Module {
  explicit MLPImpl(int64_t dim, int64_t dim_multiplier = 4);
  at::Tensor forward(const at::Tensor& x_BD);

  fsdp::nn::Linear in_proj{nullptr};
  fsdp::nn::Linear out_proj{nullptr};
};
FSDP_MODULE(MLP);

/// Two linears side by side.
struct DoubleLinearImpl : torch::nn::Module {
  explicit DoubleLinearImpl(int64_t dim);
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x_BD);

  fsdp::nn::Linear lin1{nullptr};
  fsdp::nn::Linear lin2{nullptr};
};
FSDP_MODULE(DoubleLinear);

struct TransformerOptions {
  int64_t num_layers = 2;
  int64_t vocab_size = 8;
  int64_t max_seq_len = 16;
  int64_t dim = 16;
  int64_t num_heads = 4;
  int64_t ffn_dim = 64;
  bool weight_tying = true;
  bool checkpoint_activations = false;  ///< each layer is called through checkpoint()
};

struct TransformerBlockImpl : torch::nn::Module {
  explicit TransformerBlockImpl(const TransformerOptions& options);
  at::Tensor forward(const at::Tensor& x_BSD);

  int64_t num_heads;
  fsdp::nn::LayerNorm attention_norm{nullptr};
  fsdp::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
  fsdp::nn::LayerNorm ffn_norm{nullptr};
  fsdp::nn::Linear w1{nullptr}, w2{nullptr};
  at::Tensor residual_scale;  ///< [1]: fewer rows than ranks
};
FSDP_MODULE(TransformerBlock);

/// The decoder of FSDP2's test suite without dropout, plus a one-element parameter per block.
struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const TransformerOptions& options = {});
  /// tokens_BS of int64 to logits [B, S, V].
  at::Tensor forward(const at::Tensor& tokens_BS);

  fsdp::nn::Embedding tok_embeddings{nullptr};
  fsdp::nn::Embedding pos_embeddings{nullptr};
  torch::nn::ModuleList layers{nullptr};
  fsdp::nn::LayerNorm norm{nullptr};
  fsdp::nn::Linear output{nullptr};

  std::vector<TransformerBlock> blocks;  ///< the entries of layers
  bool checkpoint_activations = false;
};
FSDP_MODULE(Transformer);

/// Gives `module` the weights that belong to `seed`, the same on every call. torch's own
/// initialisation draws from the generator of the process, which rank threads share.
void init_parameters(torch::nn::Module& module, uint64_t seed = 42);

/// Overwrites the parameters of `to` (not sharded) with those of `from`, by name.
void copy_parameters(const torch::nn::Module& from, torch::nn::Module& to);

}  // namespace fsdp::testing
