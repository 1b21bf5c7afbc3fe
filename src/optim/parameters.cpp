#include <unordered_set>

#include <torch/nn/module.h>

#include "fsdp/optim.h"

namespace fsdp {

std::vector<at::Tensor> parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (at::Tensor& param : module.parameters()) {
    if (seen.insert(param.unsafeGetTensorImpl()).second) result.push_back(std::move(param));
  }
  return result;
}

}  // namespace fsdp
