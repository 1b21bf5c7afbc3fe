#include "reduce/grad_buffer.h"

#include <algorithm>
#include <cstring>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include "fsdp/error.h"
#include "shard/shard_range.h"

namespace fsdp {
namespace {

constexpr int64_t kChunkAlignment = 16;  // elements

// The runs of `numel` elements that begin at `start` of a buffer cut into parts of `part`, when
// each part is a chunk's elements [offset, offset + part).
std::vector<GradRun> make_runs(int64_t start, int64_t numel, int64_t part, int64_t chunk,
                               int64_t offset) {
  std::vector<GradRun> runs;
  int64_t done = 0;
  while (done < numel) {
    const int64_t element = start + done;
    const int64_t in_part = element % part;
    const int64_t left = numel - done;
    GradRun run{.source = done,
                .target = element / part * chunk + offset + in_part,
                .numel = std::min(part - in_part, left),
                .count = 1,
                .stride = chunk};
    if (in_part == 0 && left >= part) run.count = left / part;  // whole parts together
    done += run.numel * run.count;
    runs.push_back(run);
  }
  return runs;
}

// Copies or adds `grad` where the run says; as strided tensors, on any device.
void write_run(const GradRun& run, const at::Tensor& grad, const at::Tensor& flat,
               bool accumulate) {
  const at::Tensor target = flat.as_strided({run.count, run.numel}, {run.stride, 1}, run.target);
  const at::Tensor source =
      grad.narrow(0, run.source, run.count * run.numel).view({run.count, run.numel});
  if (accumulate) {
    target.add_(source);
  } else {
    target.copy_(source);
  }
}

}  // namespace

GradBuffer::GradBuffer(ShardedParams& params, int64_t shard_size, int64_t num_ranks)
    : params_(params), num_chunks_(shard_size), has_flags_(num_ranks > 1) {}

// Whether every parameter that requires grad has its place in the layout.
bool GradBuffer::layout_is_current() const {
  if (!layout_) return false;
  const auto& params = params_.params();
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].sharded_param().requires_grad() && slot_of_[i] < 0) return false;
  }
  return true;
}

// Flat parameters none of which requires grad take no part.
std::shared_ptr<const GradLayout> GradBuffer::make_layout() const {
  auto layout = std::make_shared<GradLayout>();
  layout->num_chunks = num_chunks_;
  std::vector<int64_t> offset_of;  // of each flat parameter's part in a chunk, -1: none
  int64_t offset = 0;
  for (const auto& flat : params_.flats()) {
    const bool takes_part =
        std::any_of(params_.params().begin(), params_.params().end(), [&](const FSDPParam& param) {
          return &param.flat() == flat.get() && param.sharded_param().requires_grad();
        });
    offset_of.push_back(takes_part ? offset : -1);
    if (!takes_part) continue;
    layout->flats.push_back(flat.get());
    offset += flat->shard_numel();
  }
  layout->flags_offset = offset;
  for (FSDPParam& param : params_.params()) {
    const auto flat = std::find_if(params_.flats().begin(), params_.flats().end(),
                                   [&](const auto& f) { return f.get() == &param.flat(); });
    const int64_t part_offset = offset_of[flat - params_.flats().begin()];
    if (part_offset < 0) continue;
    layout->slots.push_back({.param = &param,
                             .part_offset = part_offset,
                             .shard_offset = part_offset + param.shard_offset(),
                             .runs = {}});
  }
  layout->num_flags = has_flags_ ? layout->group_flag() + 1 : 0;
  const int64_t used = offset + layout->num_flags;
  layout->chunk_numel = round_up(used, kChunkAlignment);
  const int64_t chunk = layout->chunk_numel;
  if (used < chunk) {
    layout->padding.push_back({.source = 0,
                               .target = used,
                               .numel = chunk - used,
                               .count = num_chunks_,
                               .stride = chunk});
  }
  if (params_.layout() == Layout::kPerParameter) return layout;  // its copies write padding too
  for (GradSlot& slot : layout->slots) {
    const ShardedTensorSpec& spec = *slot.param->spec();
    slot.runs = make_runs(spec.flat_start, c10::multiply_integers(spec.sizes), spec.shard_numel,
                          chunk, slot.part_offset);
  }
  // Between the parameters of each flat parameter, and behind the flags of each chunk.
  for (const FlatParam* flat : layout->flats) {
    int64_t end = 0;
    int64_t part_offset = 0;
    const auto pad = [&](int64_t begin) {
      if (begin <= end || flat->shard_numel() == 0) return;
      for (const GradRun& run :
           make_runs(end, begin - end, flat->shard_numel(), chunk, part_offset))
        layout->padding.push_back(run);
    };
    for (const GradSlot& slot : layout->slots) {
      if (&slot.param->flat() != flat) continue;
      part_offset = slot.part_offset;
      pad(slot.param->spec()->flat_start);
      end = std::max(
          end, slot.param->spec()->flat_start + c10::multiply_integers(slot.param->spec()->sizes));
    }
    pad(flat->unsharded_numel());
  }
  return layout;
}

void GradBuffer::allocate() {
  if (!layout_is_current()) {
    layout_ = make_layout();
    full_flags_.reset();
    slot_of_.assign(params_.params().size(), -1);
    for (size_t i = 0; i < layout_->slots.size(); ++i) {
      slot_of_[layout_->slots[i].param - params_.params().data()] = static_cast<int64_t>(i);
    }
  }
  if (before_allocation_) before_allocation_();
  flat_ =
      params_.pool()->allocate(layout_->num_chunks * layout_->chunk_numel, params_.reduce_dtype());
  has_grad_.assign(layout_->slots.size(), 0);
}

void GradBuffer::add(size_t index, const at::Tensor& grad) {
  const ShardedTensorSpec& spec = *params_.params()[index].spec();
  FSDP_CHECK(ConfigError, grad.layout() == at::kStrided, "post_backward: the gradient of ",
             describe(spec.fqn, spec.sizes),
             " is sparse, and only dense gradients can be reduced. Build the embedding with "
             "sparse(false).");
  if (!flat_.defined()) allocate();
  const int64_t slot = slot_of_[index];
  FSDP_CHECK(StateError, slot >= 0, "post_backward: parameter ", describe(spec.fqn, spec.sizes),
             " has got a gradient, but did not require one when the gradients that wait to be "
             "reduced were begun. Change requires_grad between steps only.");
  write(layout_->slots[slot], grad, /*accumulate=*/has_grad_[slot] != 0);
  if (has_grad_[slot] == 0) ++num_grads_;
  has_grad_[slot] = 1;
}

void GradBuffer::write(const GradSlot& slot, const at::Tensor& grad, bool accumulate) {
  const ShardedTensorSpec& spec = *slot.param->spec();
  if (params_.layout() == Layout::kPerParameter) {
    const c10::NoGradGuard no_grad;
    TORCH_INTERNAL_ASSERT(!accumulate);
    copy_whole_to_parts(spec, grad,
                        flat_.view({layout_->num_chunks, layout_->chunk_numel})
                            .narrow(1, slot.part_offset, spec.shard_numel));
    return;
  }
  const bool is_lazy = grad.is_conj() || grad.is_neg();  // contiguous() leaves such a view as it is
  const bool copies_bytes = !accumulate && !is_lazy && grad.is_cpu() && grad.is_contiguous() &&
                            grad.scalar_type() == flat_.scalar_type();
  if (!copies_bytes) {
    const c10::NoGradGuard no_grad;
    const at::Tensor source =
        (is_lazy ? grad.resolve_conj().resolve_neg() : grad).contiguous().view(-1);
    for (const GradRun& run : slot.runs) write_run(run, source, flat_, accumulate);
    return;
  }
  const auto element_bytes = static_cast<int64_t>(flat_.element_size());
  const auto* from = static_cast<const char*>(grad.const_data_ptr());
  auto* to = static_cast<char*>(flat_.mutable_data_ptr());
  for (const GradRun& run : slot.runs) {
    for (int64_t i = 0; i < run.count; ++i) {
      std::memcpy(to + (run.target + i * run.stride) * element_bytes,
                  from + (run.source + i * run.numel) * element_bytes, run.numel * element_bytes);
    }
  }
}

at::Tensor GradBuffer::make_flags(int64_t group_number) const {
  at::Tensor flags = at::empty({layout_->num_flags}, at::kFloat);
  auto* flag = flags.mutable_data_ptr<float>();
  std::copy(has_grad_.begin(), has_grad_.end(), flag);
  flag[layout_->one_flag()] = 1;
  flag[layout_->group_flag()] = static_cast<float>(group_number);
  return flags.to(flat_.options());
}

void GradBuffer::write_flags(int64_t group_number) {
  if (layout_->num_flags == 0) return;
  const auto flags_WP = [&] {
    return flat_.view({layout_->num_chunks, layout_->chunk_numel})
        .narrow(1, layout_->flags_offset, layout_->num_flags);
  };
  if (std::find(has_grad_.begin(), has_grad_.end(), 0) != has_grad_.end()) {
    flags_WP().copy_(make_flags(group_number));
    return;
  }
  // The usual case. These are kept: for a copy from the host it would wait for the device.
  if (!full_flags_.defined() || full_flags_.scalar_type() != flat_.scalar_type() ||
      full_flags_number_ != group_number) {
    full_flags_ = make_flags(group_number);
    full_flags_number_ = group_number;
  }
  if (!flat_.is_cpu()) {
    flags_WP().copy_(full_flags_);
    return;
  }
  const size_t bytes = full_flags_.nbytes();
  const size_t stride = static_cast<size_t>(layout_->chunk_numel) * flat_.element_size();
  auto* to = static_cast<char*>(flat_.mutable_data_ptr()) +
             static_cast<size_t>(layout_->flags_offset) * flat_.element_size();
  for (int64_t i = 0; i < layout_->num_chunks; ++i) {
    std::memcpy(to + static_cast<size_t>(i) * stride, full_flags_.const_data_ptr(), bytes);
  }
}

ReduceInput GradBuffer::take(bool all, int64_t group_number) {
  const c10::NoGradGuard no_grad;
  if (!flat_.defined()) allocate();
  const auto element_bytes = static_cast<int64_t>(flat_.element_size());
  const auto zero = [&](const GradRun& run) {
    if (!flat_.is_cpu()) {
      flat_.as_strided({run.count, run.numel}, {run.stride, 1}, run.target).zero_();
      return;
    }
    auto* to = static_cast<char*>(flat_.mutable_data_ptr());
    for (int64_t i = 0; i < run.count; ++i) {
      std::memset(to + (run.target + i * run.stride) * element_bytes, 0, run.numel * element_bytes);
    }
  };
  for (const GradRun& run : layout_->padding) zero(run);
  for (size_t i = 0; i < layout_->slots.size(); ++i) {
    if (has_grad_[i] != 0) continue;
    const GradSlot& slot = layout_->slots[i];
    for (const GradRun& run : slot.runs) zero(run);
    if (params_.layout() == Layout::kPerParameter) {
      zero({.source = 0,
            .target = slot.part_offset,
            .numel = slot.param->spec()->shard_numel,
            .count = layout_->num_chunks,
            .stride = layout_->chunk_numel});
    }
    if (all && slot.param->sharded_param().requires_grad()) has_grad_[i] = 1;
  }
  write_flags(group_number);
  num_grads_ = 0;
  return {.layout = layout_,
          .flat = std::move(flat_),
          .group_number = group_number,
          .has_grad = std::move(has_grad_),
          .pool = params_.pool()};
}

void GradBuffer::clear() {
  params_.pool()->give_back(std::move(flat_));
  num_grads_ = 0;
}

}  // namespace fsdp
