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
  /// kPerParameter: 1-D, the parts of rank 0, of rank 1, ...; undefined for one rank. kFlat:
  /// undefined, a gather writes to FlatParam::gathered().
  at::Tensor buffer;
  std::vector<int64_t> part_bytes;  ///< kPerParameter: of each parameter in a rank's part
  ProcessGroupPtr group;            ///< that gathers
  /// What copy-out waits for; null if the all-gather stream waits for it.
  c10::intrusive_ptr<c10d::Work> work;
  Event done;  ///< on the all-gather stream
};

/// Starts the all-gather of the parameters of one group, cast to their compute dtypes.
///
/// Memory:  one buffer of the unsharded bytes, of `params` if kFlat. A rank's own part is written
/// in place; kFlat without
///          a cast sends the flat shard itself.
/// Streams: see AllGatherStreams; the caller waits with foreach_all_gather_copy_out. With
///          `async_op` no stream waits for the collective before that; else, on a device, the
///          all-gather stream does, and the host never.
/// Ranks:   one collective over `group`, coalesced if there are several flat parameters; none with
///          one rank. `group` is that of the parameters' shards, or, of post-forward shards, that
///          of the post-forward mesh.
/// Source:  PyTorch 2.13, _fsdp_collectives.foreach_all_gather.
[[nodiscard]] AllGatherResult foreach_all_gather(ShardedParams& params,
                                                 const ProcessGroupPtr& group, bool async_op,
                                                 const AllGatherStreams& streams);

/// Waits for the all-gather, on the current stream, and makes the unsharded parameters' values
/// whole; to_unsharded() comes next. kFlat: moves the gathered bytes into their storage, and copies
/// nothing. kPerParameter: copies each parameter's parts into its own.
///
/// Errors:  CommError if the collective failed.
/// Source:  PyTorch 2.13, _fsdp_collectives.foreach_all_gather_copy_out.
void foreach_all_gather_copy_out(AllGatherResult& result, ShardedParams& params);

}  // namespace fsdp
