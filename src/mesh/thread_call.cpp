#include "mesh/thread_call.h"

#include <algorithm>
#include <unordered_map>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/ScalarType.h>

#include "fsdp/error.h"
#include "mesh/device_kernels.h"
#include "mesh/host_kernels.h"

namespace fsdp {
namespace {

constexpr int64_t kMinChunkBytes = 32 * 1024;
constexpr int64_t kChunkAlignment = 64;  // elements: no two ranks write to one cache line

// How one tensor of an all-reduce is cut, so that each rank reduces a part.
struct Chunks {
  int64_t numel = 0;
  int64_t count = 1;
  int64_t size = 0;

  [[nodiscard]] Piece of(const Piece& piece, int64_t chunk) const {
    return piece.slice(std::min(chunk * size, numel), std::min((chunk + 1) * size, numel));
  }
};

Chunks cut(const Piece& piece, int64_t num_ranks) {
  Chunks chunks;
  chunks.numel = piece.extent.numel;
  chunks.count = std::clamp<int64_t>(piece.bytes() / kMinChunkBytes, 1, num_ranks);
  chunks.size = (chunks.numel + chunks.count - 1) / chunks.count;
  chunks.size = (chunks.size + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment;
  return chunks;
}

DeviceRange range_of(const Piece& piece) {
  return {.data = piece.data,
          .device = piece.device,
          .dtype = piece.extent.dtype,
          .numel = piece.extent.numel};
}

void copy(const Piece& destination, const Piece& source) {
  if (!destination.device.is_cpu()) return copy_on_device(range_of(destination), range_of(source));
  copy_on_host(destination.data, source.data, source.bytes());
}

// Reduces over the ranks, reading with `source_of(call)`, into `destination`.
template <typename SourceOf>
void reduce(std::span<const ThreadCall> calls, const Piece& destination, SourceOf source_of) {
  std::vector<double> factors(calls.size());
  for (size_t rank = 0; rank < calls.size(); ++rank) factors[rank] = calls[rank].factor;
  if (!destination.device.is_cpu()) {
    std::vector<DeviceRange> ranges;
    for (const ThreadCall& call : calls) ranges.push_back(range_of(source_of(call)));
    return reduce_on_device(range_of(destination), calls[0].op, ranges, factors);
  }
  std::vector<const void*> sources(calls.size());
  for (size_t rank = 0; rank < calls.size(); ++rank) sources[rank] = source_of(calls[rank]).data;
  HostReduction reduction;
  reduction.dtype = destination.extent.dtype;
  reduction.op = calls[0].op;
  reduction.sources = sources;
  reduction.factors = factors;
  reduction.destination = destination.data;
  reduction.numel = destination.extent.numel;
  reduce_on_host(reduction);
}

// [Note: all-reduce in place] Rank r alone reads and writes chunk r of every rank's tensor in the
// first phase, so it can write the result over its own input. In the second phase chunk r of rank
// r is only read. No scratch memory, and each input is read once. Chunk c of tensor k belongs to
// rank (c + k) % n, so that many small tensors spread over the ranks.
void run_all_reduce(std::span<ThreadCall> calls, int phase, int rank) {
  const int64_t n = static_cast<int64_t>(calls.size());
  for (size_t k = 0; k < calls[0].inputs.size(); ++k) {
    const Chunks chunks = cut(calls[0].inputs[k], n);
    const int64_t shift = static_cast<int64_t>(k) % n;
    if (phase == 0) {
      const int64_t chunk = (rank - shift + n) % n;
      if (chunk >= chunks.count) continue;
      const size_t target = static_cast<size_t>(calls[0].root < 0 ? rank : calls[0].root);
      reduce(calls, chunks.of(calls[target].outputs[k], chunk),
             [&](const ThreadCall& call) { return chunks.of(call.inputs[k], chunk); });
    } else {
      for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
        const int64_t owner = (chunk + shift) % n;
        copy(chunks.of(calls[static_cast<size_t>(rank)].outputs[k], chunk),
             chunks.of(calls[static_cast<size_t>(owner)].outputs[k], chunk));
      }
    }
  }
}

void run_reduce_scatter(std::span<ThreadCall> calls, int phase, int rank) {
  const size_t n = calls.size();
  ThreadCall& mine = calls[static_cast<size_t>(rank)];
  if (phase == 1 && !mine.through_scratch) return;
  if (mine.through_scratch && phase == 0) {
    int64_t bytes = 0;
    for (const Piece& output : mine.outputs) bytes += output.bytes();
    if (mine.on_device) {
      mine.on_device->scratch =
          at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(mine.on_device->device));
    } else {
      mine.scratch = std::make_unique<std::byte[]>(static_cast<size_t>(bytes));
    }
  }
  std::byte* scratch = mine.scratch.get();
  if (mine.on_device && mine.through_scratch) {
    scratch = static_cast<std::byte*>(mine.on_device->scratch.mutable_data_ptr());
  }
  for (size_t k = 0; k < mine.outputs.size(); ++k) {
    Piece destination = mine.outputs[k];
    if (mine.through_scratch) {
      destination.data = scratch;
      scratch += destination.bytes();
    }
    if (phase == 0) {
      reduce(calls, destination, [&](const ThreadCall& call) {
        return call.inputs[k * n + static_cast<size_t>(rank)];
      });
    } else {
      copy(mine.outputs[k], destination);
    }
  }
}

void run_all_gather(std::span<ThreadCall> calls, int rank) {
  const size_t n = calls.size();
  const ThreadCall& mine = calls[static_cast<size_t>(rank)];
  for (size_t k = 0; k < mine.inputs.size(); ++k) {
    for (size_t peer = 0; peer < n; ++peer) {
      copy(mine.outputs[k * n + peer], calls[peer].inputs[k]);
    }
  }
}

void run_share(std::span<ThreadCall> calls, int phase, int rank) {
  const size_t me = static_cast<size_t>(rank);
  const size_t root = static_cast<size_t>(std::max(calls[0].root, 0));
  switch (calls[0].kind) {
    case CallKind::kBarrier:
      return;
    case CallKind::kBroadcast:
      for (size_t k = 0; k < calls[me].outputs.size(); ++k) {
        copy(calls[me].outputs[k], calls[root].inputs[k]);
      }
      return;
    case CallKind::kAllReduce:
    case CallKind::kReduce:
      return run_all_reduce(calls, phase, rank);
    case CallKind::kAllGather:
      return run_all_gather(calls, rank);
    case CallKind::kGather:
      return copy(calls[root].outputs[me], calls[me].inputs[0]);
    case CallKind::kScatter:
      return copy(calls[me].outputs[0], calls[root].inputs[me]);
    case CallKind::kReduceScatter:
      return run_reduce_scatter(calls, phase, rank);
    case CallKind::kAllToAll:
      for (size_t peer = 0; peer < calls.size(); ++peer) {
        copy(calls[me].outputs[peer], calls[peer].inputs[me]);
      }
      return;
    case CallKind::kPointToPoint:
      if (rank == 1) copy(calls[1].outputs[0], calls[0].inputs[0]);
      return;
  }
}

}  // namespace

c10::DeviceType ThreadCall::device_type() const {
  return on_device ? on_device->device.type() : c10::kCPU;
}

int64_t Piece::bytes() const {
  return extent.numel * static_cast<int64_t>(c10::elementSize(extent.dtype));
}

Piece Piece::slice(int64_t begin, int64_t end) const {
  Piece part = *this;
  part.data = data + begin * static_cast<int64_t>(c10::elementSize(extent.dtype));
  part.extent = {extent.dtype, end - begin};
  return part;
}

std::string describe(const ThreadCall& call) {
  constexpr size_t kShown = 4;
  std::string text = call.name;
  for (size_t i = 0; i < std::min(call.extents.size(), kShown); ++i) {
    text += c10::str(i == 0 ? " with " : ", ", call.extents[i].numel, " elements of ",
                     call.extents[i].dtype);
  }
  if (call.extents.size() > kShown) {
    text += c10::str(", ... (", call.extents.size(), " tensors)");
  }
  if (call.op != c10d::ReduceOp::UNUSED) text += c10::str(", ", reduce_op_name(call.op));
  if (call.root >= 0) text += c10::str(", root ", call.root);
  if (call.on_device) text += c10::str(", on ", c10::DeviceTypeName(call.device_type(), true));
  return text;
}

bool calls_agree(const ThreadCall& a, const ThreadCall& b) {
  const bool same_name = a.kind == CallKind::kPointToPoint || a.name == b.name;
  return a.kind == b.kind && same_name && a.extents == b.extents && a.root == b.root &&
         a.op == b.op && a.device_type() == b.device_type();
}

bool pairs_agree(const ThreadCall& from, int from_rank, const ThreadCall& to, int to_rank) {
  return from.inputs[static_cast<size_t>(to_rank)].extent ==
         to.outputs[static_cast<size_t>(from_rank)].extent;
}

int num_phases(std::span<const ThreadCall> calls) {
  switch (calls[0].kind) {
    case CallKind::kBarrier:
      return 0;
    case CallKind::kAllReduce:
      return 2;
    case CallKind::kReduceScatter:
      return std::any_of(calls.begin(), calls.end(),
                         [](const ThreadCall& call) { return call.through_scratch; })
                 ? 2
                 : 1;
    case CallKind::kBroadcast:
    case CallKind::kReduce:
    case CallKind::kAllGather:
    case CallKind::kGather:
    case CallKind::kScatter:
    case CallKind::kAllToAll:
    case CallKind::kPointToPoint:
      return 1;
  }
  return 1;
}

int64_t cost_in_bytes(std::span<const ThreadCall> calls) {
  int64_t bytes = 0;
  for (const ThreadCall& call : calls) {
    for (const Piece& piece : call.inputs) bytes += piece.bytes();
    for (const Piece& piece : call.outputs) bytes += piece.bytes();
  }
  return bytes;
}

void run_job(std::span<ThreadCall> calls, int phase, int rank) {
  const std::shared_ptr<DeviceCall> mine = calls[static_cast<size_t>(rank)].on_device;
  if (!mine) return run_share(calls, phase, rank);
  const c10::DeviceGuard on_device(mine->device);
  const StreamGuard on_stream(mine->stream);
  // A copy between devices also uses the current stream of the other: a peer's of this kind, not
  // the default one, which would then wait for this collective.
  std::unordered_map<c10::Device, std::unique_ptr<StreamGuard>> on_peers_streams;
  for (const ThreadCall& call : calls) {
    if (call.on_device->device == mine->device) continue;
    std::unique_ptr<StreamGuard>& guard = on_peers_streams[call.on_device->device];
    if (!guard) guard = std::make_unique<StreamGuard>(call.on_device->stream);
  }
  for (const ThreadCall& call : calls) {
    const DeviceCall& peer = *call.on_device;
    mine->stream.wait(phase == 0 ? peer.ready : peer.done[static_cast<size_t>(phase - 1)]);
  }
  run_share(calls, phase, rank);
  mine->done[static_cast<size_t>(phase)] = mine->stream.record();
}

}  // namespace fsdp
