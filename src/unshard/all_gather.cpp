#include "unshard/all_gather.h"

#include <algorithm>

#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "mesh/work.h"
#include "shard/storage.h"

namespace fsdp {
namespace {

// The dtype that all parameters gather in, or bytes if they differ.
at::ScalarType gather_dtype(const ShardedParams& params) {
  const auto& flats = params.flats();
  const at::ScalarType first = flats.front()->compute_dtype();
  const bool uniform = std::all_of(
      flats.begin(), flats.end(), [&](const auto& flat) { return flat->compute_dtype() == first; });
  return uniform ? first : at::kByte;
}

// On a device the all-gather stream waits, not the host; on CPU, and if asked to, whoever needs the
// parameters does.
void record(AllGatherResult& result, bool async_op, const AllGatherStreams& streams,
            c10::Device device) {
  if (result.work && !async_op && has_streams(device.type())) {
    wait_for(*result.work, *result.group, "all-gather of unshard");
    result.work.reset();
  }
  result.done = streams.all_gather.record();
}

// kFlat: each flat parameter is gathered to where it lies in the group's storage.
void gather_flat(AllGatherResult& result, ShardedParams& params, bool async_op,
                 const AllGatherStreams& streams) {
  const int64_t world_size = result.group->getSize();
  c10::SmallVector<at::Tensor, 2> inputs, outputs;
  {
    const StreamGuard on_copy_in(streams.copy_in);
    params.allocate_gathered();
    for (const auto& flat : params.flats()) {
      const at::Tensor& gathered = flat->gathered();
      if (gathered.numel() == 0) continue;
      outputs.push_back(gathered);
      inputs.push_back(flat->all_gather_input());
      if (world_size > 1 && inputs.back().scalar_type() == gathered.scalar_type()) continue;
      // Cast into this rank's part.
      const int64_t numel = gathered.numel() / world_size;
      const at::Tensor part = gathered.narrow(0, result.group->getRank() * numel, numel);
      part.copy_(inputs.back());
      inputs.back() = part;
    }
  }
  streams.all_gather.wait(streams.copy_in);
  const StreamGuard on_all_gather(streams.all_gather);
  if (world_size > 1 && outputs.size() == 1) {
    result.work = result.group->_allgather_base(outputs.front(), inputs.front());
  } else if (world_size > 1 && outputs.size() > 1) {
    std::vector<at::Tensor> all_outputs(outputs.begin(), outputs.end());
    std::vector<at::Tensor> all_inputs(inputs.begin(), inputs.end());
    result.work = result.group->allgather_into_tensor_coalesced(all_outputs, all_inputs);
  }
  record(result, async_op, streams, params.device());
}

// kPerParameter: the ranks' parts of all parameters one after the other, as one collective.
void gather_per_parameter(AllGatherResult& result, ShardedParams& params, bool async_op,
                          const AllGatherStreams& streams) {
  const int64_t world_size = result.group->getSize();
  int64_t rank_bytes = 0;
  for (const auto& flat : params.flats()) {
    const int64_t bytes = flat->all_gather_input().numel() *
                          static_cast<int64_t>(c10::elementSize(flat->compute_dtype()));
    result.part_bytes.push_back(bytes);
    rank_bytes += bytes;
  }
  if (world_size == 1 || rank_bytes == 0) return;  // copy-out reads the shards

  const at::ScalarType dtype = gather_dtype(params);
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t rank_numel = rank_bytes / element_bytes;
  at::Tensor input;
  {
    const StreamGuard on_copy_in(streams.copy_in);
    result.buffer = params.pool()->allocate(rank_numel * world_size, dtype);
    input = result.buffer.narrow(0, result.group->getRank() * rank_numel, rank_numel);
    int64_t offset = 0;
    for (size_t i = 0; i < params.flats().size(); ++i) {
      const FlatParam& flat = *params.flats()[i];
      const int64_t numel = result.part_bytes[i] / element_bytes;
      at::Tensor part = flat.all_gather_input().to(flat.compute_dtype());
      if (part.scalar_type() != dtype) part = part.view(dtype);
      input.narrow(0, offset, numel).copy_(part);
      offset += numel;
    }
  }
  streams.all_gather.wait(streams.copy_in);
  const StreamGuard on_all_gather(streams.all_gather);
  result.work = result.group->_allgather_base(result.buffer, input);
  record(result, async_op, streams, params.device());
}

void copy_out_per_parameter(AllGatherResult& result, ShardedParams& params) {
  params.allocate_unsharded();
  if (!result.buffer.defined()) {
    for (const FSDPParam& param : params.params()) {
      param.copy_out(param.flat().all_gather_input().unsqueeze(0));
    }
    return;
  }
  const at::Tensor parts = result.buffer.view({result.group->getSize(), -1});
  const auto element_bytes = static_cast<int64_t>(result.buffer.element_size());
  int64_t offset = 0;
  for (size_t i = 0; i < params.params().size(); ++i) {
    const FSDPParam& param = params.params()[i];
    const int64_t numel = result.part_bytes[i] / element_bytes;
    if (numel == 0) continue;
    at::Tensor parts_WN = parts.narrow(1, offset, numel);
    if (parts_WN.scalar_type() != param.flat().compute_dtype()) {
      parts_WN = parts_WN.contiguous().view(param.flat().compute_dtype());
    }
    param.copy_out(parts_WN);
    offset += numel;
  }
}

}  // namespace

AllGatherResult foreach_all_gather(ShardedParams& params, const ProcessGroupPtr& group,
                                   bool async_op, const AllGatherStreams& streams) {
  const c10::NoGradGuard no_grad;
  AllGatherResult result;
  result.group = group;
  if (params.layout() == Layout::kFlat) {
    try {
      gather_flat(result, params, async_op, streams);
    } catch (...) {
      params.abandon_gathered();
      throw;
    }
  } else {
    gather_per_parameter(result, params, async_op, streams);
  }
  return result;
}

void foreach_all_gather_copy_out(AllGatherResult& result, ShardedParams& params) {
  const c10::NoGradGuard no_grad;
  if (result.work) {
    try {
      wait_for(*result.work, *result.group, "all-gather of unshard");
    } catch (...) {
      if (params.layout() == Layout::kFlat) params.abandon_gathered();
      throw;
    }
    result.work.reset();
  }
  current_stream(params.device()).wait(result.done);
  if (params.layout() == Layout::kFlat) {
    params.adopt_gathered();
  } else {
    copy_out_per_parameter(result, params);
  }
}

}  // namespace fsdp
