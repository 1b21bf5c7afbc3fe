#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "fsdp/adamw.h"

namespace fsdp {

/// What AdamW's kernels take, by parameter; all of one dtype and device. `steps` are counted up
/// already.
struct AdamWLists {
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs;
  std::vector<at::Tensor> max_exp_avg_sqs;  ///< empty without amsgrad
  std::vector<at::Tensor> steps;            ///< on the CPU where there is no fused kernel
};

/// Whether torch has its fused kernel for this type of device: for the CPU and CUDA it has.
[[nodiscard]] bool has_fused_adamw(c10::Device device);

/// One step by the fused kernel.
void fused_adamw(const AdamWLists& lists, const AdamWOptions& options);

/// One step by a dozen operators, each over all parameters: on any device.
/// Source:  PyTorch 2.13, torch.optim.adam._multi_tensor_adam (not capturable).
void foreach_adamw(const AdamWLists& lists, const AdamWOptions& options);

}  // namespace fsdp
