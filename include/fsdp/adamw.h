#pragma once

#include <memory>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

namespace fsdp {

/// The hyperparameters of one parameter group. Defaults are PyTorch's.
///
/// A group's option that equals the default below takes the optimizer's value, as in torch's C++
/// optimizers, which cannot tell it from one that was not set.
/// Source:  PyTorch 2.13, torch.optim.AdamW and torch::optim::Optimizer::add_param_group.
struct AdamWOptions : torch::optim::OptimizerCloneableOptions<AdamWOptions> {
  using betas_t = std::tuple<double, double>;

  AdamWOptions(double lr = 1e-3);  // implicit, as torch's
  TORCH_ARG(double, lr);
  TORCH_ARG(betas_t, betas) = {0.9, 0.999};  ///< decay of the two averages a step, in [0, 1)
  TORCH_ARG(double, eps) = 1e-8;             ///< added to the denominator
  TORCH_ARG(double, weight_decay) = 1e-2;    ///< decoupled: times lr, taken off the parameter
  TORCH_ARG(bool, amsgrad) = false;          ///< divides by the largest exp_avg_sq so far
  TORCH_ARG(bool, maximize) = false;         ///< ascends

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  [[nodiscard]] double get_lr() const override { return lr(); }
  void set_lr(double lr) override { this->lr(lr); }
};

/// What AdamW keeps of one parameter, under its TensorImpl in state(). Names are PyTorch's.
///
/// Shapes:  as the parameter, `step` 0-dim of float (on the CPU if the parameter's
///          device has no fused kernel); views, see AdamW. Sharded if the parameter is:
///          full_tensor(exp_avg) gathers it.
struct AdamWParamState : torch::optim::OptimizerCloneableParamState<AdamWParamState> {
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;

  at::Tensor step;            ///< how many steps this parameter has made
  at::Tensor exp_avg;         ///< average of the gradient
  at::Tensor exp_avg_sq;      ///< average of its square
  at::Tensor max_exp_avg_sq;  ///< undefined without amsgrad
};

/// Adam with decoupled weight decay: one fused kernel for all parameters of a group, where torch
/// has it (CPU, CUDA), else operators over lists of parameters.
///
/// A torch::optim::Optimizer, so zero_grad(), learning-rate schedulers and torch::save work. Each
/// rank steps its own shards; plain parameters may be mixed in. Build it after fully_shard(), from
/// fsdp::parameters(model). A parameter without a gradient is left alone and its step does not
/// count. On the CPU, neighbours in memory go to the kernel as one tensor.
///
/// Shapes:  parameters dense (contiguous in some order of dimensions), of a floating-point type.
/// Memory:  two (amsgrad: three) times the parameters, from the first step on, which allocates for
///          all that have or require a gradient: one buffer per group, dtype, device and kind of
///          state, each parameter's part at a multiple of 64 bytes. A parameter that comes later,
///          unfrozen or added, gets a buffer of its step. A gradient whose strides are not the
///          parameter's is copied for the step.
/// Ranks:   no communication. torch::save writes this rank's shards; torch::load takes them back
///          on the same rank of the same number of ranks.
/// Errors:  ConfigError for no parameters, one listed twice, not a leaf, not of floating point or
///          not dense, options out of range or of another optimizer, and for sparse gradients.
///          StateError, also from step(), if a parameter is an unsharded one of a sharded module,
///          which would train nothing; and if a gradient or the state does not match its parameter.
///          CheckpointError for a loaded state of other shapes. Then all is as it was.
/// Source:  PyTorch 2.13, torch.optim.AdamW(fused=True).
class AdamW : public torch::optim::Optimizer {
 public:
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 const AdamWOptions& defaults = {});
  explicit AdamW(std::vector<at::Tensor> params, const AdamWOptions& defaults = {});

  /// Hides torch's, which would drop the options of a type that it does not know: do not call it
  /// through a reference to torch's Optimizer.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// Updates the parameters and moves their version counters. Returns what `closure` returned,
  /// which runs first.
  at::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  using StateKind = at::Tensor AdamWParamState::*;

  void check_params(const std::vector<at::Tensor>& params, size_t group) const;
  void check_step() const;
  [[nodiscard]] const AdamWParamState* find_state(const at::Tensor& param) const;
  AdamWParamState& state_of(const at::Tensor& param);
  void make_missing_state(const std::vector<at::Tensor>& params, bool amsgrad);
  void lay_out_loaded(const std::vector<at::Tensor>& params, StateKind kind, size_t group);
  void lay_out(const std::vector<at::Tensor>& params, StateKind kind);
  void step_params(const std::vector<at::Tensor>& params, const AdamWOptions& options);
};

}  // namespace fsdp
