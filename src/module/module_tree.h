#pragma once

#include <functional>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "base/path.h"

namespace fsdp {

using ParameterDict = torch::OrderedDict<std::string, at::Tensor>;

/// The module's own parameter dictionary, to exchange its entries.
[[nodiscard]] ParameterDict& parameter_dict(torch::nn::Module& module);

/// Calls `visit` for `root` and each module below it, parents first, each module once.
/// `visit` gets the path from the root ("" for the root).
void for_each_module(torch::nn::Module& root,
                     const std::function<void(const std::string&, torch::nn::Module&)>& visit);

}  // namespace fsdp
