#include "schedule/prefetch.h"

namespace fsdp {

void backward_prefetch(FSDPParamGroup& group) {
  const std::optional<size_t> index = group.pop_post_forward_index();
  if (!index || *index == 0) return;
  const auto& order = group.comm().post_forward_order;
  if (*index > order.size()) return;
  if (const std::shared_ptr<FSDPParamGroup> previous = order[*index - 1].lock()) {
    previous->prefetch(TrainingState::kPreBackward);
  }
}

}  // namespace fsdp
