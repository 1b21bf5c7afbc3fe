#include "schedule/comm_context.h"

namespace fsdp {

CommContext::CommContext(c10::Device device)
    : device_(device),
      all_gather_streams_{.copy_in = new_stream(device, /*high_priority=*/true),
                          .all_gather = new_stream(device, /*high_priority=*/true)},
      reduce_streams_{.reduce_scatter = new_stream(device, /*high_priority=*/true),
                      .all_reduce = new_stream(device, /*high_priority=*/false)},
      pool_(std::make_shared<BufferPool>(device)) {}

void CommContext::all_gather_streams_wait(const Event& event) const {
  all_gather_streams_.copy_in.wait(event);
  all_gather_streams_.all_gather.wait(event);
}

void CommContext::keep_gathered(at::DataPtr bytes, Event last_use) {
  free_gathered();
  gathered_.emplace(Gathered{.bytes = std::move(bytes), .last_use = std::move(last_use)});
}

void CommContext::free_gathered() {
  if (!gathered_) return;
  all_gather_streams_wait(gathered_->last_use);
  gathered_.reset();
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

void CommContext::finish_ready_reductions() {
  while (!reductions_.empty()) {
    const std::shared_ptr<Reduction> reduction = reductions_.front().lock();
    if (reduction && !reduction->is_ready()) return;
    pop_reduction();
  }
}

void CommContext::finish_reductions() {
  while (!reductions_.empty()) pop_reduction();
}

void CommContext::drop_in_flight() noexcept {
  for (const auto& entry : reductions_) {
    if (const auto reduction = entry.lock()) reduction->abandon();
  }
  reductions_.clear();
  gathered_.reset();
  post_forward_order.clear();
}

}  // namespace fsdp
