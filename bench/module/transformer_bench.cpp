// Question: how long is a whole training step of a decoder, sharded over two ranks, and how much
// memory does it take?
//
// Forward, backward, AdamW (fused) and zero_grad, wall time, the ranks in step; the median and the
// smallest of the steps. `transformer_bench small|large threads|processes|alone float32|bfloat16
// STEPS`: ranks are threads of this process, or the processes of torchrun's environment over Gloo;
// or there is no sharding and this process trains alone. Beside it bench/peer/transformer.py, the
// same in PyTorch's FSDP2, from the same parameters and tokens: the losses show that both do the
// same work. With the malloc tracker preloaded also the peak of the heap. One JSON line.

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/GradMode.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/adamw.h"
#include "fsdp/fsdp.h"
#include "support/local_backend.h"

namespace {

using fsdp::bench::wall_us;

struct Sizes {
  int64_t dim, num_layers, num_heads, seq_len, batch_size, vocab_size;
};

torch::nn::Linear linear(int64_t in, int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}
torch::nn::LayerNorm layer_norm(int64_t dim) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim}));
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Sizes& sizes) : num_heads(sizes.num_heads) {
    const int64_t d = sizes.dim;
    ln1 = register_module("ln1", layer_norm(d));
    ln2 = register_module("ln2", layer_norm(d));
    qkv = register_module("qkv", linear(d, 3 * d));
    proj = register_module("proj", linear(d, d));
    up = register_module("up", linear(d, 4 * d));
    down = register_module("down", linear(4 * d, d));
  }
  at::Tensor forward(at::Tensor x_BSD) {
    const int64_t b = x_BSD.size(0), s = x_BSD.size(1), d = x_BSD.size(2);
    const auto heads = [&](const at::Tensor& t) {
      return t.view({b, s, num_heads, d / num_heads}).transpose(1, 2);
    };
    const auto parts = qkv(ln1(x_BSD)).chunk(3, -1);
    const at::Tensor y = at::scaled_dot_product_attention(heads(parts[0]), heads(parts[1]),
                                                          heads(parts[2]), {}, 0.0, true);
    x_BSD = x_BSD + proj(y.transpose(1, 2).reshape({b, s, d}));
    return x_BSD + down(torch::nn::functional::gelu(up(ln2(x_BSD))));
  }
  int64_t num_heads;
  torch::nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  torch::nn::Linear qkv{nullptr}, proj{nullptr}, up{nullptr}, down{nullptr};
};
FSDP_MODULE(Block);

struct DecoderImpl : torch::nn::Module {
  explicit DecoderImpl(const Sizes& sizes) {
    tok = register_module("tok", torch::nn::Embedding(sizes.vocab_size, sizes.dim));
    pos = register_module("pos", torch::nn::Embedding(sizes.seq_len, sizes.dim));
    for (int64_t i = 0; i < sizes.num_layers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(sizes)));
    }
    norm = register_module("norm", layer_norm(sizes.dim));
    head = register_module("head", linear(sizes.dim, sizes.vocab_size));
    const c10::NoGradGuard no_grad;
    int64_t number = 0;
    for (at::Tensor& param : parameters()) {
      const at::Tensor values =
          (at::arange(param.numel(), at::kDouble) * 0.618 + static_cast<double>(number++)).sin();
      param.copy_((values * 0.05).view(param.sizes()));
      if (param.dim() == 1) param.add_(number % 2 == 1 ? 1.0 : 0.0);  // of layer norms
    }
  }
  at::Tensor forward(const at::Tensor& tokens_BS) {
    at::Tensor x = tok(tokens_BS) + pos(at::arange(tokens_BS.size(1)));
    for (auto& block : blocks) x = block(x);
    return head(norm(x));
  }
  torch::nn::Embedding tok{nullptr}, pos{nullptr};
  std::vector<Block> blocks;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
FSDP_MODULE(Decoder);

// Bytes of the heap, by the malloc tracker if it is preloaded.
int64_t tracked(const char* function) {
  auto* const found = reinterpret_cast<int64_t (*)()>(::dlsym(RTLD_DEFAULT, function));
  return found == nullptr ? -1 : found();
}

struct Options {
  std::string size;
  bool sharded;
  bool bfloat16;
  int num_steps;
};

void train(const Options& options, const fsdp::ProcessGroupPtr& group) {
  const Sizes sizes =
      options.size == "small" ? Sizes{64, 24, 4, 32, 2, 256} : Sizes{1024, 4, 16, 128, 2, 4096};
  const int rank = group ? group->getRank() : 0;
  const int64_t baseline = tracked("malloc_tracker_live");
  Decoder model(sizes);
  int64_t num_params = 0;
  for (const at::Tensor& param : model->parameters()) num_params += param.numel();
  if (options.sharded) {
    fsdp::FullyShardOptions shard{.reshard_after_forward = true};
    if (options.bfloat16) {
      shard.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    }
    for (auto& block : model->blocks) fsdp::fully_shard(*block, shard);
    shard.reshard_after_forward = std::monostate();
    fsdp::fully_shard(*model, shard);
  } else if (options.bfloat16) {
    model->to(at::kBFloat16);
  }
  fsdp::AdamW optimizer(fsdp::parameters(*model), fsdp::AdamWOptions(1e-4));
  const at::Tensor stream = at::arange(sizes.batch_size * (sizes.seq_len + 1)) * 31 + 17 * rank;
  const at::Tensor tokens =
      stream.remainder(sizes.vocab_size).view({sizes.batch_size, sizes.seq_len + 1});
  const at::Tensor inputs = tokens.narrow(1, 0, sizes.seq_len).contiguous();
  const at::Tensor targets = tokens.narrow(1, 1, sizes.seq_len).contiguous().view({-1});
  std::vector<double> times;
  std::string losses;
  constexpr int kWarmUp = 2;
  for (int step = 0; step < kWarmUp + options.num_steps; ++step) {
    if (group) group->barrier()->wait();
    if (step == kWarmUp) (void)tracked("malloc_tracker_reset_peak");
    const double begin = wall_us();
    const at::Tensor loss =
        at::cross_entropy_loss(model(inputs).to(at::kFloat).view({-1, sizes.vocab_size}), targets);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (step >= kWarmUp) times.push_back((wall_us() - begin) / 1e3);
    if (step < 4) losses += (step == 0 ? "" : ", ") + std::to_string(loss.item<double>());
  }
  const int64_t peak = tracked("malloc_tracker_peak");
  if (group) group->barrier()->wait();
  if (rank != 0) return;
  std::sort(times.begin(), times.end());
  std::printf(
      "{\"case\": \"transformer-%s\", \"step_ms\": %.2f, \"best_ms\": %.2f, \"params\": %lld, "
      "\"losses\": [%s]",
      options.size.c_str(), times[times.size() / 2], times.front(),
      static_cast<long long>(num_params), losses.c_str());
  if (peak >= 0)
    std::printf(", \"peak_mib\": %.2f", static_cast<double>(peak - baseline) / (1 << 20));
  std::printf("}\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr,
                 "transformer_bench small|large threads|processes|alone float32|bfloat16 STEPS\n");
    return 2;
  }
  at::set_num_threads(1);
  const std::string ranks = argv[2];
  const Options options{.size = argv[1],
                        .sharded = ranks != "alone",
                        .bfloat16 = std::strcmp(argv[3], "bfloat16") == 0,
                        .num_steps = std::atoi(argv[4])};
  if (ranks == "threads") {
    fsdp::run_ranks(2, [&](const fsdp::ProcessGroupPtr& group) { train(options, group); });
  } else if (ranks == "processes") {
    train(options, fsdp::init_process_group());
    fsdp::destroy_process_group();
  } else {
    train(options, nullptr);
  }
  return 0;
}
