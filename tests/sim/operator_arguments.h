#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

// Arguments for an operator of which nothing is known but its schema.
namespace fsdp::testing {

/// What an operator is tried with. Shapes are such that much fits them: square matrices multiply,
/// an image is also a filter for itself.
struct Recipe {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  int64_t integer = 1;
  bool boolean = false;
  bool fills_optional = false;  ///< gives tensors that may be left out
  at::ScalarType out_dtype = at::kFloat;
};

/// In the order in which they are tried.
[[nodiscard]] std::vector<Recipe> recipes();

/// Arguments on the CPU, new ones at each call and always the same values; empty if an argument is
/// of a type that only some kinds of tensors have (names of dimensions, storages, streams).
[[nodiscard]] std::optional<std::vector<c10::IValue>> arguments_for(
    const c10::FunctionSchema& schema, const Recipe& recipe);

/// The same with copies of all tensors on `device`, and the device in place of the CPU.
[[nodiscard]] std::vector<c10::IValue> to_device(const std::vector<c10::IValue>& values,
                                                 const c10::Device& device);

/// The tensors among `values`, also those in lists; undefined ones too.
[[nodiscard]] std::vector<at::Tensor> tensors_in(const std::vector<c10::IValue>& values);

}  // namespace fsdp::testing
