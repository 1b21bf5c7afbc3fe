#include "support/models.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/GradMode.h>

#include "fsdp/activation.h"
#include "fsdp/fully_shard.h"

namespace fsdp::testing {

MLPImpl::MLPImpl(int64_t dim, int64_t dim_multiplier) {
  in_proj = register_module("in_proj", fsdp::nn::Linear(dim, dim * dim_multiplier));
  out_proj = register_module("out_proj", fsdp::nn::Linear(dim * dim_multiplier, dim));
}

at::Tensor MLPImpl::forward(const at::Tensor& x_BD) {
  return at::relu(out_proj(at::relu(in_proj(x_BD))));
}

DoubleLinearImpl::DoubleLinearImpl(int64_t dim) {
  lin1 = register_module("lin1", fsdp::nn::Linear(dim, dim));
  lin2 = register_module("lin2", fsdp::nn::Linear(dim, dim));
}

std::pair<at::Tensor, at::Tensor> DoubleLinearImpl::forward(const at::Tensor& x_BD) {
  return {at::relu(lin1(x_BD)), at::relu(lin2(x_BD))};
}

TransformerBlockImpl::TransformerBlockImpl(const TransformerOptions& options)
    : num_heads(options.num_heads) {
  const int64_t dim = options.dim;
  const auto norm_options = torch::nn::LayerNormOptions({dim});
  const auto no_bias = torch::nn::LinearOptions(dim, dim).bias(false);
  attention_norm = register_module("attention_norm", fsdp::nn::LayerNorm(norm_options));
  wq = register_module("wq", fsdp::nn::Linear(no_bias));
  wk = register_module("wk", fsdp::nn::Linear(no_bias));
  wv = register_module("wv", fsdp::nn::Linear(no_bias));
  wo = register_module("wo", fsdp::nn::Linear(no_bias));
  ffn_norm = register_module("ffn_norm", fsdp::nn::LayerNorm(norm_options));
  w1 = register_module("w1", fsdp::nn::Linear(dim, options.ffn_dim));
  w2 = register_module("w2", fsdp::nn::Linear(options.ffn_dim, dim));
  residual_scale = register_parameter("residual_scale", at::ones({1}));
}

at::Tensor TransformerBlockImpl::forward(const at::Tensor& x_BSD) {
  const at::Tensor normed_BSD = attention_norm(x_BSD);
  const auto heads = [&](const at::Tensor& y_BSD) {
    return y_BSD.unflatten(-1, {num_heads, -1}).transpose(1, 2);
  };
  const at::Tensor attended = at::scaled_dot_product_attention(
      heads(wq(normed_BSD)), heads(wk(normed_BSD)), heads(wv(normed_BSD)), {}, 0.0,
      /*is_causal=*/true);
  const at::Tensor h_BSD = x_BSD + wo(attended.transpose(1, 2).flatten(-2)) * residual_scale;
  return h_BSD + w2(at::gelu(w1(ffn_norm(h_BSD))));
}

TransformerImpl::TransformerImpl(const TransformerOptions& options)
    : checkpoint_activations(options.checkpoint_activations) {
  tok_embeddings =
      register_module("tok_embeddings", fsdp::nn::Embedding(options.vocab_size, options.dim));
  pos_embeddings =
      register_module("pos_embeddings", fsdp::nn::Embedding(options.max_seq_len, options.dim));
  layers = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < options.num_layers; ++i) {
    blocks.emplace_back(options);
    layers->push_back(blocks.back());
  }
  norm = register_module("norm", fsdp::nn::LayerNorm(torch::nn::LayerNormOptions({options.dim})));
  output = register_module(
      "output",
      fsdp::nn::Linear(torch::nn::LinearOptions(options.dim, options.vocab_size).bias(false)));
  if (options.weight_tying)
    fsdp::tie(*tok_embeddings, tok_embeddings->weight, *output, output->weight);
}

at::Tensor TransformerImpl::forward(const at::Tensor& tokens_BS) {
  at::Tensor h_BSD = tok_embeddings(tokens_BS) +
                     pos_embeddings(at::arange(tokens_BS.size(1), tokens_BS.options()));
  for (TransformerBlock& block : blocks) {
    h_BSD = checkpoint_activations ? fsdp::checkpoint(block, h_BSD) : block(h_BSD);
  }
  return output(norm(h_BSD)).to(at::kFloat);
}

void init_parameters(torch::nn::Module& module, uint64_t seed) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const c10::NoGradGuard no_grad;
  for (auto& entry : module.named_parameters()) {
    at::Tensor& param = entry.value();
    const bool is_scale = entry.key().find("norm.weight") != std::string::npos ||
                          entry.key().find("scale") != std::string::npos;
    param.normal_(is_scale ? 1.0 : 0.0, param.dim() >= 2 ? 0.2 : 0.02, generator);
  }
}

void copy_parameters(const torch::nn::Module& from, torch::nn::Module& to) {
  const c10::NoGradGuard no_grad;
  auto target = to.named_parameters();
  for (const auto& entry : from.named_parameters()) target[entry.key()].copy_(entry.value());
}

}  // namespace fsdp::testing
