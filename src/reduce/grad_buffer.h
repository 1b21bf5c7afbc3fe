#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shard/sharded_params.h"

namespace fsdp {

/// Elements that lie one behind the other in a gradient and in the buffer: `count` times `numel`
/// elements from `source` go to `target`, `target` + `stride`, and so on.
struct GradRun {
  int64_t source = 0;
  int64_t target = 0;
  int64_t numel = 0;
  int64_t count = 0;
  int64_t stride = 0;
};

/// Where one parameter's gradient lies in what a group reduces.
struct GradSlot {
  FSDPParam* param = nullptr;
  int64_t part_offset = 0;    ///< in each rank's chunk: of its flat parameter's part
  int64_t shard_offset = 0;   ///< in this rank's chunk: of the sharded gradient
  std::vector<GradRun> runs;  ///< kFlat: at most three, of the whole gradient
};

/// The input of a group's reduce-scatter: one chunk for each rank. A chunk holds that rank's part
/// of each flat parameter that is reduced; then, with more than one rank, a flag for each
/// parameter, 1 if this rank has a gradient for it, one that is always 1, and one with the group's
/// number; then zeros.
///
/// Reduced with the gradients, a flag is 0 if no rank had a gradient, and equal to the one that is
/// always 1 if all had: so ranks that took different branches agree on what is stepped. If the last
/// one is not the group's number, some rank reduced another group at this time.
struct GradLayout {
  std::vector<const FlatParam*> flats;
  std::vector<GradSlot> slots;  ///< of the parameters in `flats`
  int64_t num_chunks = 1;
  int64_t chunk_numel = 0;
  int64_t flags_offset = 0;  ///< in a chunk
  int64_t num_flags = 0;
  [[nodiscard]] int64_t one_flag() const { return static_cast<int64_t>(slots.size()); }
  [[nodiscard]] int64_t group_flag() const { return one_flag() + 1; }
  std::vector<GradRun> padding;  ///< what no gradient and no flag is written to; `source` is unused
};

/// A group's whole gradients, copied to where the reduce-scatter reads them.
struct ReduceInput {
  std::shared_ptr<const GradLayout> layout;
  at::Tensor flat;  ///< 1-D of num_chunks * chunk_numel, in the dtype of the reduction
  int64_t group_number = 0;
  std::vector<char> has_grad;        ///< of each slot, on this rank
  std::shared_ptr<BufferPool> pool;  ///< of `flat`, and for the result
};

/// Collects the gradients of one group until they are reduced.
///
/// Memory:  the group's whole gradients in the dtype of the reduction, from the first add() on.
/// Streams: the current one.
class GradBuffer {
 public:
  /// `params` outlive it. `num_ranks` counts all ranks of the mesh.
  GradBuffer(ShardedParams& params, int64_t shard_size, int64_t num_ranks);

  /// Takes the whole gradient of parameter `index` over, or adds it to one that is there.
  /// Errors:  ConfigError for a sparse gradient; StateError if the parameter was frozen when the
  ///          buffer's first gradient came.
  void add(size_t index, const at::Tensor& grad);
  [[nodiscard]] bool has_grads() const { return num_grads_ > 0; }
  /// Is called before memory is allocated: what it frees serves this buffer.
  void set_before_allocation(std::function<void()> function) {
    before_allocation_ = std::move(function);
  }
  /// Ends the collection. With `all`, every parameter that requires grad counts as having one, of
  /// zeros if need be.
  [[nodiscard]] ReduceInput take(bool all, int64_t group_number);
  void clear();

 private:
  void allocate();
  [[nodiscard]] bool layout_is_current() const;
  [[nodiscard]] std::shared_ptr<const GradLayout> make_layout() const;
  void write(const GradSlot& slot, const at::Tensor& grad, bool accumulate);
  void write_flags(int64_t group_number);
  [[nodiscard]] at::Tensor make_flags(int64_t group_number) const;

  ShardedParams& params_;
  int64_t num_chunks_;
  bool has_flags_;
  std::function<void()> before_allocation_;
  std::shared_ptr<const GradLayout> layout_;
  std::vector<int64_t> slot_of_;  // of each parameter, -1: none
  at::Tensor flat_;               // undefined: no gradient yet
  std::vector<char> has_grad_;
  int64_t num_grads_ = 0;
  at::Tensor full_flags_;  // those of a rank with all gradients, on the device
  int64_t full_flags_number_ = 0;
};

}  // namespace fsdp
