#include "train/export.h"

#include <unordered_set>

#include <nlohmann/json.hpp>

#include "fsdp/sharded_tensor.h"

namespace fsdp::train {

NamedTensors unique_parameters(const torch::nn::Module& module) {
  NamedTensors parameters;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      parameters.emplace_back(item.key(), item.value());
    }
  }
  return parameters;
}

NamedTensors full_weights(const torch::nn::Module& module) {
  NamedTensors weights = unique_parameters(module);
  for (auto& [name, tensor] : weights) tensor = full_tensor(tensor).detach();
  return weights;
}

std::string config_json(const models::LlamaConfig& config) {
  const nlohmann::ordered_json json = {
      {"architectures", {"LlamaForCausalLM"}},
      {"model_type", "llama"},
      {"vocab_size", config.vocab_size},
      {"hidden_size", config.hidden_size},
      {"intermediate_size", config.intermediate_size},
      {"num_hidden_layers", config.num_hidden_layers},
      {"num_attention_heads", config.num_attention_heads},
      {"num_key_value_heads", config.num_key_value_heads},
      {"head_dim", config.head_dim()},
      {"max_position_embeddings", config.max_position_embeddings},
      {"rms_norm_eps", config.rms_norm_eps},
      {"rope_theta", config.rope_theta},
      {"tie_word_embeddings", config.tie_word_embeddings},
      {"initializer_range", config.initializer_range},
      {"hidden_act", "silu"},
      {"attention_bias", false},
      {"mlp_bias", false},
      {"bos_token_id", nullptr},  // bytes: no value is special
      {"eos_token_id", nullptr},
      {"torch_dtype", "float32"},
  };
  return json.dump(2) + "\n";
}

}  // namespace fsdp::train
