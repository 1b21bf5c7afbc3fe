// Scaled dot product attention: the operators that PyTorch leaves to a device of its own, made of
// those that the CPU has, chosen as on the CPU.

#include <tuple>

#include <ATen/ATen.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include "sim/tensors.h"

namespace fsdp::sim {
namespace {

using at::Tensor;

int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value,
               const std::optional<Tensor>& mask, double dropout, bool is_causal,
               std::optional<double> scale, bool enable_gqa) {
  std::optional<Tensor> host_mask;
  if (mask && mask->defined()) host_mask = host_alias(*mask);
  const int64_t choice =
      at::_fused_sdp_choice(host_alias(query), host_alias(key), host_alias(value), host_mask,
                            dropout, is_causal, scale, enable_gqa);
  return static_cast<int64_t>(choice == static_cast<int64_t>(at::SDPBackend::flash_attention)
                                  ? at::SDPBackend::overrideable
                                  : at::SDPBackend::math);
}

using Forward =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

Forward forward(const Tensor& query, const Tensor& key, const Tensor& value,
                const std::optional<Tensor>& bias, double dropout, bool is_causal, bool debug_mask,
                std::optional<double> scale) {
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, value, dropout, is_causal, bias, scale);
  const Tensor unused = at::empty({0}, query.options().dtype(at::kLong));
  return {output,          logsumexp, unused,         unused, query.sym_size(2),
          key.sym_size(2), unused,    unused.clone(), unused};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& bias, std::array<bool, 4> wanted, const Tensor& output, const Tensor& logsumexp,
    const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool is_causal,
    const Tensor&, const Tensor&, std::optional<double> scale) {
  std::optional<Tensor> mask;
  if (bias.defined()) mask = bias;
  auto [grad_query, grad_key, grad_value] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          grad_output, query, key, value, output, logsumexp, dropout, is_causal, mask, scale);
  return {grad_query, grad_key, grad_value, Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_fused_sdp_choice", &choose);
  library.impl("_scaled_dot_product_fused_attention_overrideable", &forward);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", &backward);
}

}  // namespace

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& mask, double dropout, bool is_causal,
                         std::optional<double> scale, bool enable_gqa) {
  return choose(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
}

}  // namespace fsdp::sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fsdp::sim::choose_attention)
}
