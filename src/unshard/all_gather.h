#pragma once

#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/stream.h"
#include "fsdp/process_group.h"
#include "shard/fsdp_param.h"

namespace fsdp {

/// Where an all-gather runs: its copy-in on one stream, the collective on another.
struct AllGatherStreams {
  Stream copy_in;
  Stream all_gather;
};

/// An all-gather in flight. The buffer is let go behind the event that ends its use.
struct AllGatherResult {
  at::Tensor buffer;                ///< 1-D: the parts of rank 0, of rank 1, ...
  std::vector<int64_t> part_bytes;  ///< of each parameter in a rank's part
  int64_t world_size = 1;           ///< of the group that gathers; 1: buffer is undefined
  ProcessGroupPtr group;
  c10::intrusive_ptr<c10d::Work> work;  ///< null once the all-gather stream waits for it
  Event done;                           ///< on the all-gather stream
};

/// Starts the all-gather of the parameters of one group, cast to their compute dtypes.
///
/// Memory:  one buffer of the unsharded bytes; the rank's own part is written in place.
/// Streams: see AllGatherStreams; the caller waits with foreach_all_gather_copy_out.
/// Ranks:   one _allgather_base over `group`, none with one rank.
/// Source:  PyTorch 2.13, _fsdp_collectives.foreach_all_gather.
[[nodiscard]] AllGatherResult foreach_all_gather(std::span<FSDPParam> params,
                                                 const ProcessGroupPtr& group, int64_t world_size,
                                                 int64_t rank, const AllGatherStreams& streams);

/// Waits for the all-gather and copies each parameter's parts into its storage, on the current
/// stream. The parameters' state is unchanged.
/// Errors:  CommError if the collective failed.
void foreach_all_gather_copy_out(AllGatherResult& result, std::span<FSDPParam> params);

}  // namespace fsdp
