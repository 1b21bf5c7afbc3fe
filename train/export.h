#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "models/llama.h"
#include "train/safetensors.h"

namespace fsdp::train {

/// The parameters of a module by name, each once: a tied one under its first name.
[[nodiscard]] NamedTensors unique_parameters(const torch::nn::Module& module);

/// The whole weights, by the names of Hugging Face.
/// Memory:  all of them, on every rank.
/// Ranks:   collective.
[[nodiscard]] NamedTensors full_weights(const torch::nn::Module& module);

/// The model's config.json, as Hugging Face's LlamaConfig reads it.
[[nodiscard]] std::string config_json(const models::LlamaConfig& config);

}  // namespace fsdp::train
