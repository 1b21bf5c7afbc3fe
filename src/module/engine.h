#pragma once

#include <memory>

#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace fsdp {

/// Says what becomes of the tensors that autograd saves.
class SavedTensorPacker {
 public:
  virtual ~SavedTensorPacker() = default;
  /// The hooks for the next tensor. They may be dropped unused.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;
  /// A PackScope with this has ended: no more tensors will come from there.
  virtual void scope_ended() {}
};

/// While it exists, `packer` is asked about each tensor that autograd saves on this thread; the
/// innermost one alone. Null: autograd keeps them.
///
/// [Note: the engine]
/// Autograd asks its engine for these hooks. The first scope of the process makes an engine of ours
/// the default one, for good; it differs in nothing else. It may have run before, and a backward
/// that runs on another thread meanwhile ends on the engine it began with. Python's engine, in the
/// same process, would be lost.
/// Threads: a scope belongs to its thread. The engine's device threads open their own, when they
/// recompute.
class PackScope {
 public:
  explicit PackScope(SavedTensorPacker* packer);
  ~PackScope();
  PackScope(const PackScope&) = delete;
  PackScope& operator=(const PackScope&) = delete;

 private:
  SavedTensorPacker* packer_;
  SavedTensorPacker* outer_;
};

}  // namespace fsdp
