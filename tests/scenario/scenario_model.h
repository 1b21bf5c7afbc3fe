#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <nlohmann/json.hpp>

#include "fsdp/fsdp_module.h"
#include "fsdp/nn.h"
#include "fsdp/policy.h"

// The modules of a scenario (docs/scenario.md), made of JSON.
namespace fsdp::testing {

/// A forward: of one tensor, to one or two.
using ModuleCall = std::function<std::vector<at::Tensor>(const at::Tensor&)>;

struct ScenarioModel {
  std::shared_ptr<torch::nn::Module> root;
  std::map<std::string, FSDPModule*> modules;  ///< that run hooks, by path
  std::map<std::string, ModuleCall> calls;     ///< their forwards
  std::map<std::string, fsdp::nn::Linear> linears;

  [[nodiscard]] FSDPModule& module(const std::string& path) const;
};

/// Numbers in [-0.5, 0.5) that belong to `key`, the same bits in every language.
at::Tensor uniform(at::IntArrayRef sizes, const std::string& key);

/// The modules with their weights, ties and frozen parameters. Not sharded.
ScenarioModel build_model(const nlohmann::json& scenario);

/// Makes the fully_shard() calls of the scenario. On every rank.
void shard(const ScenarioModel& model, const nlohmann::json& scenario, Layout layout);

/// The parameters of `module`, each once, under its first name.
std::vector<std::pair<std::string, at::Tensor>> unique_parameters(const torch::nn::Module& module);

}  // namespace fsdp::testing
