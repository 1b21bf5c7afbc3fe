#include "unshard/all_gather.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "mesh/work.h"

namespace fsdp {
namespace {

// The dtype that all parameters gather in, or bytes if they differ.
at::ScalarType gather_dtype(std::span<const FSDPParam> params) {
  const at::ScalarType first = params.front().compute_dtype();
  const bool uniform = std::all_of(params.begin(), params.end(), [&](const FSDPParam& param) {
    return param.compute_dtype() == first;
  });
  return uniform ? first : at::kByte;
}

}  // namespace

AllGatherResult foreach_all_gather(std::span<FSDPParam> params, const ProcessGroupPtr& group,
                                   int64_t world_size, int64_t rank,
                                   const AllGatherStreams& streams) {
  AllGatherResult result;
  result.world_size = world_size;
  result.group = group;
  int64_t rank_bytes = 0;
  for (const FSDPParam& param : params) {
    const int64_t bytes = param.all_gather_input().numel() *
                          static_cast<int64_t>(c10::elementSize(param.compute_dtype()));
    result.part_bytes.push_back(bytes);
    rank_bytes += bytes;
  }
  if (world_size == 1 || rank_bytes == 0) return result;  // copy-out reads the shards

  const c10::NoGradGuard no_grad;
  const at::ScalarType dtype = gather_dtype(params);
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t rank_numel = rank_bytes / element_bytes;
  at::Tensor input;
  {
    const StreamGuard on_copy_in(streams.copy_in);
    result.buffer = at::empty({rank_numel * world_size},
                              params.front().all_gather_input().options().dtype(dtype));
    input = result.buffer.narrow(0, rank * rank_numel, rank_numel);
    int64_t offset = 0;
    for (size_t i = 0; i < params.size(); ++i) {
      const int64_t numel = result.part_bytes[i] / element_bytes;
      at::Tensor part = params[i].all_gather_input().to(params[i].compute_dtype());
      if (part.scalar_type() != dtype) part = part.view(dtype);
      input.narrow(0, offset, numel).copy_(part);
      offset += numel;
    }
  }
  streams.all_gather.wait(streams.copy_in);
  {
    const StreamGuard on_all_gather(streams.all_gather);
    result.work = group->_allgather_base(result.buffer, input);
    if (has_streams(result.buffer.device().type())) {
      wait_for(*result.work, *group, "all-gather of unshard");  // the stream waits, not the host
      result.work.reset();
    }
    result.done = streams.all_gather.record();
  }
  return result;
}

void foreach_all_gather_copy_out(AllGatherResult& result, std::span<FSDPParam> params) {
  const c10::NoGradGuard no_grad;
  if (result.work) {
    wait_for(*result.work, *result.group, "all-gather of unshard");
    result.work.reset();
  }
  if (!result.buffer.defined()) {
    for (FSDPParam& param : params) param.copy_out(param.all_gather_input().unsqueeze(0));
    return;
  }
  current_stream(result.buffer.device()).wait(result.done);
  const at::Tensor parts = result.buffer.view({result.world_size, -1});
  const auto element_bytes = static_cast<int64_t>(result.buffer.element_size());
  int64_t offset = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    const int64_t numel = result.part_bytes[i] / element_bytes;
    at::Tensor parts_WN = parts.narrow(1, offset, numel);
    if (parts_WN.scalar_type() != params[i].compute_dtype()) {
      parts_WN = parts_WN.contiguous().view(params[i].compute_dtype());
    }
    params[i].copy_out(parts_WN);
    offset += numel;
  }
}

}  // namespace fsdp
