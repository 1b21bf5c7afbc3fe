#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/stream.h"
#include "fsdp/process_group.h"
#include "shard/sharded_params.h"

namespace fsdp {

/// Where an all-gather runs: its copy-in on one stream, the collective on another.
struct AllGatherStreams {
  Stream copy_in;
  Stream all_gather;
};

/// An all-gather in flight. The buffer is let go behind the event that ends its use.
struct AllGatherResult {
  /// 1-D. kPerParameter: the parts of rank 0, of rank 1, ...; undefined for one rank.
  /// kFlat: the bytes of the unsharded parameters' storage.
  at::Tensor buffer;
  std::vector<int64_t> part_bytes;  ///< kPerParameter: of each parameter in a rank's part
  int64_t world_size = 1;           ///< of the group that gathers
  ProcessGroupPtr group;
  c10::intrusive_ptr<c10d::Work> work;  ///< null once the all-gather stream waits for it
  Event done;                           ///< on the all-gather stream
};

/// Starts the all-gather of the parameters of one group, cast to their compute dtypes.
///
/// Memory:  one buffer of the unsharded bytes. A rank's own part is written in place; kFlat without
///          a cast sends the flat shard itself.
/// Streams: see AllGatherStreams; the caller waits with foreach_all_gather_copy_out.
/// Ranks:   one collective over `group`, coalesced if there are several flat parameters; none with
///          one rank.
/// Source:  PyTorch 2.13, _fsdp_collectives.foreach_all_gather.
[[nodiscard]] AllGatherResult foreach_all_gather(ShardedParams& params,
                                                 const ProcessGroupPtr& group, int64_t world_size,
                                                 int64_t rank, const AllGatherStreams& streams);

/// Waits for the all-gather, on the current stream, and makes the parameters valid. kFlat: moves
/// the buffer's bytes into their storage, and copies nothing. kPerParameter: copies each
/// parameter's parts into its own. Errors:  CommError if the collective failed.
void foreach_all_gather_copy_out(AllGatherResult& result, ShardedParams& params);

}  // namespace fsdp
