#include "module/module_tree.h"

#include <unordered_set>

namespace fsdp {
namespace {

// torch keeps the dictionary protected; a member pointer formed in a derived class reaches it.
struct ModuleAccess : torch::nn::Module {
  static ParameterDict& parameters_of(torch::nn::Module& module) {
    return module.*(&ModuleAccess::parameters_);
  }
};

void visit_tree(const std::string& path, torch::nn::Module& module,
                std::unordered_set<torch::nn::Module*>& visited,
                const std::function<void(const std::string&, torch::nn::Module&)>& visit) {
  if (!visited.insert(&module).second) return;
  visit(path, module);
  for (const auto& child : module.named_children()) {
    visit_tree(join_path(path, child.key()), *child.value(), visited, visit);
  }
}

}  // namespace

ParameterDict& parameter_dict(torch::nn::Module& module) {
  return ModuleAccess::parameters_of(module);
}

void for_each_module(torch::nn::Module& root,
                     const std::function<void(const std::string&, torch::nn::Module&)>& visit) {
  std::unordered_set<torch::nn::Module*> visited;
  visit_tree("", root, visited, visit);
}

}  // namespace fsdp
