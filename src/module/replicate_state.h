#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "fsdp/fsdp_module.h"
#include "fsdp/replicate.h"

namespace fsdp {

/// What replicate() reduces and broadcasts.
struct ReplicatedTensors {
  std::vector<at::Tensor> params;  ///< each once
  std::vector<std::string> names;  ///< of params
  std::vector<at::Tensor> buffers;
};

/// The state that replicate() gives a module: tells c10d's Reducer when forward and backward begin.
///
/// Owned by the hooked module and by the graphs of its forwards: the Reducer's hooks refer to it,
/// and the graph may outlive the module.
/// Source: PyTorch 2.13, torch.nn.parallel.DistributedDataParallel (_pre_forward, _post_forward).
class ReplicateState final : public ForwardHooks,
                             public std::enable_shared_from_this<ReplicateState> {
 public:
  ReplicateState(ReplicatedTensors tensors, const ReplicateOptions& options);

  void pre_forward(torch::nn::Module& module, TensorRefs& inputs) override;
  void post_forward(torch::nn::Module& module, TensorRefs& outputs) override;
  void forward_threw(torch::nn::Module& module) noexcept override;
  /// The buckets' dtype and device are those of the parameters: makes new ones.
  void converted(torch::nn::Module& module) override;
  [[nodiscard]] bool shards() const override { return false; }

  /// The gradient of an output has arrived.
  void backward_begins();
  /// All outputs' gradients have arrived that will.
  void outputs_have_gradients();

  [[nodiscard]] bool requires_sync() const { return requires_sync_; }
  void set_requires_sync(bool requires_sync) { requires_sync_ = requires_sync; }

 private:
  void make_reducer();
  void begin_step();
  void start_over();
  void check_last_backward() const;
  void broadcast_buffers();

  const ReplicatedTensors tensors_;
  const ReplicateOptions options_;
  std::vector<at::Tensor> trainable_;
  std::vector<std::string> trainable_names_;
  std::shared_ptr<c10d::Reducer> reducer_;
  std::shared_ptr<c10d::Logger> logger_;
  bool requires_sync_ = true;
  bool buffers_may_differ_ = true;
  bool in_backward_ = false;         // stays so if backward throws
  bool knows_static_graph_ = false;  // the first backward of a static graph has begun
  int num_forwards_ = 0;             // that are running: a module may call itself
};

}  // namespace fsdp
