#include "schedule/comm_context.h"

namespace fsdp {

CommContext::CommContext(c10::Device device)
    : device_(device),
      all_gather_streams_{.copy_in = new_stream(device, /*high_priority=*/true),
                          .all_gather = new_stream(device, /*high_priority=*/true)},
      reduce_streams_{.reduce_scatter = new_stream(device, /*high_priority=*/true),
                      .all_reduce = new_stream(device, /*high_priority=*/false)} {}

void CommContext::all_gather_streams_wait(const Event& event) const {
  all_gather_streams_.copy_in.wait(event);
  all_gather_streams_.all_gather.wait(event);
}

void CommContext::note_unsharded_freed() {
  if (has_streams(device_.type())) unsharded_freed_ = compute_stream().record();
}

void CommContext::wait_for_freed() const {
  if (unsharded_freed_.recorded()) all_gather_streams_wait(unsharded_freed_);
}

void CommContext::keep_gather_buffer(at::Tensor buffer, Event copied_out) {
  free_gather_buffer();
  gather_buffer_.emplace(
      GatherBuffer{.buffer = std::move(buffer), .copied_out = std::move(copied_out)});
}

void CommContext::free_gather_buffer() {
  if (!gather_buffer_) return;
  all_gather_streams_wait(gather_buffer_->copied_out);
  gather_buffer_.reset();
}

void CommContext::pop_reduction() {
  const std::shared_ptr<Reduction> reduction = reductions_.front().lock();
  reductions_.pop_front();
  if (!reduction) return;  // its group is gone
  reduction->finish();
  reduction->release_input();
}

void CommContext::add_reduction(const std::shared_ptr<Reduction>& reduction) {
  reductions_.push_back(reduction);
}

void CommContext::make_room_for_reduction() {
  while (reductions_.size() >= max_reductions_) pop_reduction();
}

void CommContext::finish_reductions() {
  while (!reductions_.empty()) pop_reduction();
}

void CommContext::drop_in_flight() noexcept {
  for (const auto& entry : reductions_) {
    if (const auto reduction = entry.lock()) reduction->abandon();
  }
  reductions_.clear();
  gather_buffer_.reset();
  post_forward_order.clear();
}

}  // namespace fsdp
