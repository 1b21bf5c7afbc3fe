#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/utils.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <nlohmann/json.hpp>
#ifndef FMT_HEADER_ONLY
#define FMT_HEADER_ONLY
#endif
#include <fmt/format.h>

#include "fsdp/device_mesh.h"
#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "train/tokenizer.h"

// B sequences of this rank, T tokens, V vocabulary.
namespace fsdp::train {
namespace {

models::LlamaForCausalLM make_model(const TrainConfig& config) {
  models::LlamaForCausalLM llama(config.model);
  initialize(llama, config.model, at::make_generator<at::CPUGeneratorImpl>(config.seed));

  FullyShardOptions options;
  options.mesh = init_device_mesh(config.npu ? c10::kPrivateUse1 : c10::kCPU);
  options.reshard_after_forward = config.reshard_after_forward;
  if (config.bf16) {
    options.mp_policy.param_dtype = at::kBFloat16;
    options.mp_policy.reduce_dtype = at::kFloat;
  }
  for (models::LlamaDecoderLayer& layer : llama->model->layers) fully_shard(*layer, options);
  if (config.bf16) options.mp_policy.output_dtype = at::kFloat;  // of the logits, for the loss
  fully_shard(*llama, options);
  return llama;
}

AdamW make_optimizer(const TrainConfig& config, const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> matrices, vectors;  // a shard may be empty: what counts is the whole
  for (const at::Tensor& param : params) {
    const ShardedTensorSpec* spec = spec_of(param);
    const bool matrix = (spec != nullptr ? spec->sizes.size() : param.sizes().size()) >= 2;
    (matrix ? matrices : vectors).push_back(param);
  }
  const auto group = [&](std::vector<at::Tensor> members, double weight_decay) {
    auto options = std::make_unique<AdamWOptions>(config.lr);
    options->betas({config.betas[0], config.betas[1]}).weight_decay(weight_decay);
    return torch::optim::OptimizerParamGroup(std::move(members), std::move(options));
  };
  return AdamW({group(matrices, config.weight_decay), group(vectors, 0.0)});
}

void set_lr(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

void print_start(const TrainConfig& config, const TokenFile& data) {
  const models::LlamaConfig& model = config.model;
  fmt::print("fsdp-train: {} layers of {} features, {} ranks as {}{}, {}; {} tokens from {}\n",
             model.num_hidden_layers, model.hidden_size, config.ranks,
             config.launched ? "processes" : "threads", config.npu ? " on NPUs" : "",
             config.bf16 ? "bf16" : "fp32", data.tokens().size(), config.data);
}

class Stopwatch {
 public:
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace

Trainer::Trainer(const TrainConfig& config, const TokenFile& data, ProcessGroupPtr group)
    : config_(config),
      data_(data),
      group_(std::move(group)),
      split_(split(data.tokens(), config.seq_len())),
      schedule_{.lr = config.lr,
                .min_lr = config.min_lr,
                .warmup_steps = config.warmup_steps,
                .steps = config.steps},
      llama_(make_model(config)),
      params_(parameters(*llama_)),
      optimizer_(make_optimizer(config, params_)) {}

StepMetrics Trainer::step(int64_t step) {
  const Stopwatch stopwatch;
  const double lr = schedule_.at(step);
  set_lr(optimizer_, lr);
  optimizer_.zero_grad();

  at::Tensor loss = at::zeros({}, device());
  const int64_t count = config_.local_batch_size();
  for (int64_t micro = 0; micro < config_.accumulate_steps; ++micro) {
    const bool last = micro + 1 == config_.accumulate_steps;
    llama_->set_requires_gradient_sync(last);
    llama_->set_is_last_backward(last);

    const int64_t first = (micro * config_.ranks + group_->getRank()) * count;
    const Batch batch =
        batch_at(split_.train,
                 train_offsets(split_.train, config_.seq_len(), config_.seed, step, first, count),
                 config_.seq_len());
    const at::Tensor micro_loss = loss_of(batch) / config_.accumulate_steps;
    micro_loss.backward();
    loss += micro_loss.detach();
  }
  const double max_norm =
      config_.grad_clip > 0 ? config_.grad_clip : std::numeric_limits<double>::infinity();
  const at::Tensor grad_norm = clip_grad_norm_(params_, max_norm);
  optimizer_.step();

  const double mean_loss = mean_over_ranks(loss);
  const auto num_tokens = static_cast<double>(config_.batch_size * config_.seq_len());
  return {.step = step + 1,
          .loss = mean_loss,
          .grad_norm = grad_norm.item<double>(),
          .lr = lr,
          .tokens_per_s = num_tokens / stopwatch.seconds(),
          .val_loss = {}};
}

at::Tensor Trainer::loss_of(const Batch& batch) {
  const at::Tensor logits_BTV = llama_(batch.inputs_BT.to(device()));
  return at::cross_entropy_loss(logits_BTV.flatten(0, 1), batch.targets_BT.to(device()).flatten());
}

double Trainer::mean_over_ranks(const at::Tensor& value) {
  // On the host: HCCL sums no doubles.
  std::vector<at::Tensor> sum = {value.detach().to(at::kCPU, at::kDouble, /*non_blocking=*/false,
                                                   /*copy=*/true)};
  group_->allreduce(sum)->wait();
  return sum[0].item<double>() / group_->getSize();
}

double Trainer::validate() {
  const torch::NoGradGuard no_grad;
  const int64_t count = config_.batch_size / config_.ranks;
  const int64_t total = config_.val_batches * config_.batch_size;
  at::Tensor loss = at::zeros({}, device());
  for (int64_t batch = 0; batch < config_.val_batches; ++batch) {
    const int64_t first = (batch * config_.ranks + group_->getRank()) * count;
    loss +=
        loss_of(batch_at(split_.validation,
                         spread_offsets(split_.validation, config_.seq_len(), total, first, count),
                         config_.seq_len()));
  }
  return mean_over_ranks(loss / config_.val_batches);
}

std::vector<uint16_t> Trainer::sample() {
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(config_.seed);
  std::vector<uint16_t> tokens = encode(config_.prompt);
  for (int64_t i = 0; i < config_.sample_tokens; ++i) {
    const size_t length = std::min(tokens.size(), static_cast<size_t>(config_.seq_len()));
    const std::vector<int64_t> context(tokens.end() - static_cast<int64_t>(length), tokens.end());
    const at::Tensor context_BT = at::tensor(context).unsqueeze(0).to(device());
    const at::Tensor logits_V = llama_(context_BT).select(0, 0).select(0, -1).cpu();
    const at::Tensor next = config_.temperature == 0
                                ? logits_V.argmax()
                                : (logits_V / config_.temperature)
                                      .softmax(0)
                                      .multinomial(1, /*replacement=*/false, generator);
    tokens.push_back(static_cast<uint16_t>(next.item<int64_t>()));
  }
  return tokens;
}

void Trainer::run() {
  std::optional<MetricsLog> log;
  if (group_->getRank() == 0) {
    const std::filesystem::path out_dir = config_.out_dir;
    std::filesystem::create_directories(out_dir);
    write_text(out_dir / "train.toml", config_.as_file);
    log.emplace(out_dir / "metrics.jsonl", config_.steps);
  }
  const Stopwatch stopwatch;
  double val_loss = 0;
  for (int64_t i = 0; i < config_.steps; ++i) {
    StepMetrics metrics = step(i);
    FSDP_CHECK(StateError, std::isfinite(metrics.loss) && std::isfinite(metrics.grad_norm),
               "fsdp-train: after step ", metrics.step, " the loss is ", metrics.loss,
               " and the gradient norm ", metrics.grad_norm,
               ". Lower --lr or raise --warmup-steps.");
    const bool last = metrics.step == config_.steps;
    if (last || (config_.val_every > 0 && metrics.step % config_.val_every == 0)) {
      val_loss = validate();
      metrics.val_loss = val_loss;
    }
    metrics.elapsed_s = stopwatch.seconds();
    if (log) log->record(metrics);
  }
  report(val_loss);
}

void Trainer::report(double val_loss) {
  const std::vector<uint16_t> sampled = sample();
  const NamedTensors weights = this->weights();
  if (group_->getRank() != 0) return;

  const std::filesystem::path out_dir = config_.out_dir;
  write_safetensors(out_dir / "model.safetensors", weights);
  write_text(out_dir / "config.json", config_json(config_.model));

  // Of both, the one that is harder to beat. A bigram table fitted to the validation text itself
  // has an advantage over the model, which never saw it.
  const double whole_text = bigram_entropy(data_.tokens(), data_.vocab_size());
  const double validation_text = bigram_entropy(split_.validation, data_.vocab_size());
  const double bigram = std::min(whole_text, validation_text);
  const bool beaten = val_loss < bigram;
  const nlohmann::ordered_json summary = {{"val_loss", val_loss},
                                          {"bigram_entropy", bigram},
                                          {"bigram_entropy_of_text", whole_text},
                                          {"bigram_entropy_of_validation_split", validation_text},
                                          {"beaten", beaten}};
  write_text(out_dir / "summary.json", summary.dump(2) + "\n");

  if (config_.sample_tokens > 0) fmt::print("\n{}\n\n", decode(sampled));
  fmt::print("bigram entropy:  {:.4f} nats per byte (whole text {:.4f}, validation split {:.4f})\n",
             bigram, whole_text, validation_text);
  fmt::print("validation loss: {:.4f} nats per byte: {} the bigram entropy by {:.4f}\n", val_loss,
             beaten ? "below" : "NOT below", std::abs(bigram - val_loss));
  fmt::print("wrote {}\n", (out_dir / "model.safetensors").string());
}

void train(const TrainConfig& config) {
  const TokenFile data = open_tokens(config.data);
  FSDP_CHECK(ConfigError, data.vocab_size() == config.model.vocab_size, "fsdp-train: '",
             config.data, "' has a vocabulary of ", data.vocab_size(), " tokens, the model one of ",
             config.model.vocab_size, ".");
  const std::chrono::seconds timeout(config.timeout_s);
  const auto run_rank = [&](const ProcessGroupPtr& group) {
    if (group->getRank() == 0) print_start(config, data);
    Trainer(config, data, group).run();
  };
  if (config.launched) {
    ProcessGroupOptions options;
    options.timeout = timeout;
    if (config.npu) options.backend = "cpu:gloo,npu:hccl";
    run_rank(init_process_group(options));
    destroy_process_group();
  } else {
    run_ranks(config.ranks, run_rank, {.timeout = timeout});
  }
}

}  // namespace fsdp::train
