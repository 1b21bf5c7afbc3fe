#include "scenario/scenario_model.h"

#include <unordered_set>

#include <ATen/ops/arange.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/container/modulelist.h>

#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "support/models.h"

namespace fsdp::testing {
namespace {

using nlohmann::json;

uint32_t fnv1a(const std::string& text) {
  uint32_t value = 2166136261;
  for (const unsigned char byte : text) value = (value ^ byte) * 16777619;
  return value;
}

std::string join(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

struct Child {
  std::shared_ptr<torch::nn::Module> module;
  ModuleCall call;
  int passed = -1;  // which of two outputs goes to the next child; -1: their sum
};

at::Tensor passed_on(const Child& child, const std::vector<at::Tensor>& outputs) {
  if (child.passed >= 0) return outputs[child.passed];
  return outputs.size() == 2 ? outputs[0] + outputs[1] : outputs[0];
}

// Runs its children in the order of `run`.
struct ChainImpl : torch::nn::Module {
  ChainImpl(std::vector<Child> children, std::vector<size_t> run)
      : children_(std::move(children)), run_(std::move(run)) {
    const auto layers = register_module("layers", torch::nn::ModuleList());
    for (const Child& child : children_) layers->push_back(child.module);
  }

  std::vector<at::Tensor> forward(const at::Tensor& input) {
    at::Tensor x = input;
    std::vector<at::Tensor> outputs;
    for (size_t i = 0; i < run_.size(); ++i) {
      if (i > 0) x = passed_on(children_[run_[i - 1]], outputs);
      outputs = children_[run_[i]].call(x);
    }
    return outputs;
  }

  std::vector<Child> children_;
  std::vector<size_t> run_;
};
FSDP_MODULE(Chain);

class Builder {
 public:
  explicit Builder(ScenarioModel& model) : model_(model) {}

  Child build(const json& node, const std::string& path) {
    const std::string type = node["type"];
    Child child;
    if (type == "linear") {
      child = add(make_linear(node, path), path);
    } else if (type == "mlp") {
      child = add(make_mlp(node, path), path);
    } else if (type == "double") {
      child = double_linear(node, path);
    } else if (type == "sequential") {
      child = sequential(node, path);
    } else {
      child = chain(node, path);
    }
    child.passed = node.value("pass", -1);
    return child;
  }

 private:
  // Makes a module known under its path. Its forward gives one tensor, a pair or a vector.
  template <class Holder>
  Child add(const Holder& holder, const std::string& path) {
    ModuleCall call = [module = holder](const at::Tensor& x) mutable -> std::vector<at::Tensor> {
      auto result = module->forward(x);
      if constexpr (std::is_same_v<decltype(result), at::Tensor>) {
        return {std::move(result)};
      } else if constexpr (std::is_same_v<decltype(result), std::vector<at::Tensor>>) {
        return result;
      } else {
        return {result.first, result.second};
      }
    };
    Holder module = holder;
    model_.modules[path] = module.get();
    model_.calls[path] = call;
    return {.module = holder.ptr(), .call = std::move(call)};
  }

  void add_linear(const fsdp::nn::Linear& linear, const std::string& path) {
    model_.linears.emplace(path, linear);
    add(linear, path);
  }

  fsdp::nn::Linear make_linear(const json& node, const std::string& path) {
    const fsdp::nn::Linear linear(
        torch::nn::LinearOptions(node["in"].get<int64_t>(), node["out"].get<int64_t>())
            .bias(node["bias"].get<bool>()));
    add_linear(linear, path);
    return linear;
  }

  MLP make_mlp(const json& node, const std::string& path) {
    MLP mlp(node["dim"].get<int64_t>(), node["mult"].get<int64_t>());
    add_linear(mlp->in_proj, join(path, "in_proj"));
    add_linear(mlp->out_proj, join(path, "out_proj"));
    return mlp;
  }

  Child double_linear(const json& node, const std::string& path) {
    DoubleLinear module(node["dim"].get<int64_t>());
    add_linear(module->lin1, join(path, "lin1"));
    add_linear(module->lin2, join(path, "lin2"));
    return add(module, path);
  }

  Child sequential(const json& node, const std::string& path) {
    fsdp::nn::Sequential sequential;
    for (const json& child : node["children"]) {
      const std::string child_path = join(path, std::to_string(sequential->size()));
      if (child["type"] == "mlp") {
        const MLP mlp = make_mlp(child, child_path);
        add(mlp, child_path);
        sequential->push_back(mlp);
      } else {
        sequential->push_back(make_linear(child, child_path));
      }
    }
    return add(sequential, path);
  }

  Child chain(const json& node, const std::string& path) {
    std::vector<Child> children;
    std::vector<size_t> run;
    for (const json& child : node["children"]) {
      run.push_back(run.size());
      children.push_back(build(child, join(path, "layers." + std::to_string(children.size()))));
    }
    if (node.contains("run")) run = node["run"].get<std::vector<size_t>>();
    return add(Chain(std::move(children), std::move(run)), path);
  }

  ScenarioModel& model_;
};

// The Linear that has the parameter `fqn`, and which of its two it is.
at::Tensor& parameter(ScenarioModel& model, const std::string& fqn) {
  const size_t dot = fqn.rfind('.');
  const std::string path = dot == std::string::npos ? "" : fqn.substr(0, dot);
  fsdp::nn::Linear& linear = model.linears.at(path);
  return fqn.substr(dot + 1) == "weight" ? linear->weight : linear->bias;
}

torch::nn::Module& owner(ScenarioModel& model, const std::string& fqn) {
  return *model.linears.at(fqn.find('.') == std::string::npos ? "" : fqn.substr(0, fqn.rfind('.')));
}

std::optional<at::ScalarType> dtype_of(const json& policy, const char* key) {
  if (!policy.contains(key)) return std::nullopt;
  const std::string name = policy[key];
  if (name == "fp32") return at::kFloat;
  return name == "bf16" ? at::kBFloat16 : at::kHalf;
}

FullyShardOptions options_of(const json& call, const DeviceMeshPtr& mesh, Layout layout) {
  FullyShardOptions options{.mesh = mesh, .layout = layout};
  if (call.contains("reshard")) {
    const json& reshard = call["reshard"];
    if (reshard.is_boolean()) options.reshard_after_forward = reshard.get<bool>();
    if (reshard.is_number()) options.reshard_after_forward = reshard.get<int64_t>();
  }
  if (call.contains("mp")) {
    const json& policy = call["mp"];
    options.mp_policy = {.param_dtype = dtype_of(policy, "param"),
                         .reduce_dtype = dtype_of(policy, "reduce"),
                         .output_dtype = dtype_of(policy, "output"),
                         .cast_forward_inputs = policy.value("cast_inputs", true)};
  }
  return options;
}

}  // namespace

FSDPModule& ScenarioModel::module(const std::string& path) const {
  const auto found = modules.find(path);
  FSDP_CHECK(ConfigError, found != modules.end(), "scenario: there is no module '", path, "'.");
  return *found->second;
}

at::Tensor uniform(at::IntArrayRef sizes, const std::string& key) {
  const int64_t two_to_31 = int64_t{1} << 31;
  const at::Tensor index = at::arange(c10::multiply_integers(sizes), at::kLong);
  const int64_t offset = int64_t{fnv1a(key)} * 40503 + 12345;
  const at::Tensor value = (index * 2654435761 + offset).remainder(2 * two_to_31);
  const at::Tensor hashed = (value * 1103515245 + 12345).remainder(two_to_31);
  return (hashed.bitwise_right_shift(7).to(at::kFloat) / 16777216 - 0.5).view(sizes);
}

std::vector<std::pair<std::string, at::Tensor>> unique_parameters(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  std::unordered_set<const void*> seen;
  for (const auto& entry : module.named_parameters()) {
    if (!seen.insert(entry.value().unsafeGetTensorImpl()).second) continue;
    result.emplace_back(entry.key(), entry.value());
  }
  return result;
}

ScenarioModel build_model(const json& scenario) {
  ScenarioModel model;
  model.root = Builder(model).build(scenario["model"], "").module;
  for (const json& tie : scenario.value("ties", json::array())) {
    fsdp::tie(owner(model, tie[0]), parameter(model, tie[0]), owner(model, tie[1]),
              parameter(model, tie[1]));
  }
  const c10::NoGradGuard no_grad;
  const std::string seed = std::to_string(scenario["seed"].get<int64_t>());
  for (auto& [name, param] : unique_parameters(*model.root)) {
    param.copy_(uniform(param.sizes(), seed + "/" + name));
  }
  for (const json& fqn : scenario.value("frozen", json::array())) {
    parameter(model, fqn).set_requires_grad(false);
  }
  return model;
}

void shard(const ScenarioModel& model, const json& scenario, Layout layout) {
  const auto shape = scenario.value("mesh", std::vector<int64_t>{});
  const DeviceMeshPtr mesh =
      shape.size() == 2 ? init_device_mesh(c10::DeviceType::CPU, shape, {"replicate", "shard"})
                        : init_device_mesh(c10::DeviceType::CPU);
  for (const json& call : scenario["shard"]) {
    const FullyShardOptions options = options_of(call, mesh, layout);
    if (!call["module"].is_array()) {
      fully_shard(model.module(call["module"]).as_module(), options);
      continue;
    }
    std::vector<std::reference_wrapper<torch::nn::Module>> modules;
    for (const json& path : call["module"]) modules.emplace_back(model.module(path).as_module());
    fully_shard(modules, options);
  }
}

}  // namespace fsdp::testing
