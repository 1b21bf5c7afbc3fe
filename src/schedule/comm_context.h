#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/stream.h"
#include "reduce/reduce_scatter.h"
#include "unshard/all_gather.h"

namespace fsdp {

class FSDPParamGroup;

/// The streams and the buffers in flight that the groups of one root share.
///
/// Source: PyTorch 2.13, _fsdp_param_group.FSDPCommContext; the table of stream operations is in
/// docs/design.md.
class CommContext {
 public:
  explicit CommContext(c10::Device device);

  /// The streams of an all-gather that overlaps with compute.
  [[nodiscard]] const AllGatherStreams& all_gather_streams() const { return all_gather_streams_; }
  [[nodiscard]] const ReduceStreams& reduce_streams() const { return reduce_streams_; }
  [[nodiscard]] Stream compute_stream() const { return current_stream(device_); }

  /// The memory of the root's gathers and reductions.
  [[nodiscard]] const std::shared_ptr<BufferPool>& pool() const { return pool_; }

  /// Both all-gather streams wait for `event`.
  void all_gather_streams_wait(const Event& event) const;

  /// Keeps bytes that a gather has filled until the next gather has been started, which so need not
  /// wait for their last use; frees those kept before.
  void keep_gathered(at::DataPtr bytes, Event last_use);
  /// Frees the bytes kept: what the all-gather streams do from now on waits for their last use.
  void free_gathered();

  void add_reduction(const std::shared_ptr<Reduction>& reduction);
  /// How many reductions may hold their input. 1 unless set.
  void set_max_reductions(size_t max_reductions) { max_reductions_ = max_reductions; }
  /// Ends the oldest reductions, so that one more may start.
  void make_room_for_reduction();
  /// Ends the oldest reductions as far as no other rank has to be waited for.
  void finish_ready_reductions();
  /// Ends all reductions, at the end of backward.
  void finish_reductions();
  /// After a step that threw: waits for what is in flight and drops it. Never throws.
  void drop_in_flight() noexcept;

  /// The groups in the order of this iteration's forwards, with repetitions.
  std::vector<std::weak_ptr<FSDPParamGroup>> post_forward_order;

 private:
  struct Gathered {
    at::DataPtr bytes;
    Event last_use;
  };

  void pop_reduction();

  c10::Device device_;
  AllGatherStreams all_gather_streams_;
  ReduceStreams reduce_streams_;
  std::shared_ptr<BufferPool> pool_;
  std::optional<Gathered> gathered_;
  std::deque<std::weak_ptr<Reduction>> reductions_;  // owned by their groups
  size_t max_reductions_ = 1;
};

}  // namespace fsdp
