#include "mesh/thread_backend.h"

#include <algorithm>
#include <utility>

#include "fsdp/error.h"
#include "mesh/host_kernels.h"

namespace fsdp {
namespace {

using Tensors = ThreadBackend::Tensors;
using TensorLists = ThreadBackend::TensorLists;

// A rank's handle of an operation.
class ThreadWork final : public c10d::Work {
 public:
  ThreadWork(std::shared_ptr<ThreadOp> op, int slot, std::chrono::milliseconds timeout,
             Tensors results)
      : c10d::Work(slot), op_(std::move(op)), timeout_(timeout), results_(std::move(results)) {}

  bool isCompleted() override { return op_->poll(rank_); }
  bool isSuccess() const override { return op_->succeeded(); }
  std::exception_ptr exception() const override {
    const std::string reason = op_->error();
    if (reason.empty()) return nullptr;
    return std::make_exception_ptr(
        CommError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, reason));
  }
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    op_->wait(rank_, timeout == kNoTimeout ? timeout_ : timeout);
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (!future_) future_ = op_->future(rank_, results_);
    return future_;
  }
  uint64_t getSequencenumber() const override { return op_->sequence(); }

 private:
  const std::shared_ptr<ThreadOp> op_;
  const std::chrono::milliseconds timeout_;
  const Tensors results_;
  FuturePtr future_;
};

void check_tensor(const ThreadCall& call, const at::Tensor& tensor) {
  FSDP_CHECK(ConfigError, tensor.defined(), call.name, ": a tensor is undefined.");
  const bool has_memory = tensor.is_cpu() || has_streams(tensor.device().type());
  FSDP_CHECK(ConfigError, has_memory && tensor.layout() == at::kStrided, call.name,
             ": the thread backend works on dense tensors of the host or of a device, found ",
             tensor.toString(), " on ", tensor.device(), ".");
  FSDP_CHECK(ConfigError, call.tensors.empty() || call.tensors[0].device() == tensor.device(),
             call.name, ": the tensors of one call must be on one device, found ",
             call.tensors[0].device(), " and ", tensor.device(), ".");
  FSDP_CHECK(ConfigError, tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(),
             call.name, ": a tensor of shape ", tensor.sizes(), " with strides ", tensor.strides(),
             " is not contiguous. Pass tensor.contiguous().");
}

Piece whole(const at::Tensor& tensor, bool is_output) {
  Piece piece;
  piece.extent = {tensor.scalar_type(), tensor.numel()};
  const void* data = is_output ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
  piece.data = static_cast<std::byte*>(const_cast<void*>(data));
  piece.device = tensor.device();
  return piece;
}

// Checks a tensor, keeps it alive and names its memory.
Piece take(ThreadCall& call, const at::Tensor& tensor, bool is_output) {
  check_tensor(call, tensor);
  call.tensors.push_back(tensor);
  return whole(tensor, is_output);
}

void take_all(ThreadCall& call, const Tensors& tensors, bool is_output) {
  std::vector<Piece>& pieces = is_output ? call.outputs : call.inputs;
  for (const at::Tensor& tensor : tensors) pieces.push_back(take(call, tensor, is_output));
}

// Takes a flat tensor as `count` equal pieces.
void take_cut(ThreadCall& call, const at::Tensor& tensor, bool is_output, int64_t count) {
  const Piece flat = take(call, tensor, is_output);
  std::vector<Piece>& pieces = is_output ? call.outputs : call.inputs;
  const int64_t numel = flat.extent.numel / count;
  for (int64_t i = 0; i < count; ++i) pieces.push_back(flat.slice(i * numel, (i + 1) * numel));
}

// Takes a flat tensor as pieces of the given numbers of rows; equal ones if there are none.
void take_split(ThreadCall& call, const at::Tensor& tensor, bool is_output,
                const std::vector<int64_t>& splits, int64_t num_ranks) {
  const char* const side = is_output ? "output" : "input";
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    FSDP_CHECK(ConfigError, rows % num_ranks == 0, call.name, ": the ", side, " has ", rows,
               " rows, which ", num_ranks, " ranks do not divide. Pass split sizes.");
    return take_cut(call, tensor, is_output, num_ranks);
  }
  int64_t total = 0;
  for (const int64_t split : splits) total += split;
  FSDP_CHECK(ConfigError, static_cast<int64_t>(splits.size()) == num_ranks && total == rows,
             call.name, ": the ", side, " splits ", at::IntArrayRef(splits),
             " must be one per rank of ", num_ranks, " and add up to the ", rows, " rows of the ",
             side, ".");
  const Piece flat = take(call, tensor, is_output);
  std::vector<Piece>& pieces = is_output ? call.outputs : call.inputs;
  const int64_t row_numel = rows == 0 ? 0 : flat.extent.numel / rows;
  int64_t begin = 0;
  for (const int64_t split : splits) {
    pieces.push_back(flat.slice(begin, begin + split * row_numel));
    begin += split * row_numel;
  }
}

bool overlap(const Piece& a, const Piece& b) {
  return a.bytes() > 0 && b.bytes() > 0 && a.data < b.data + b.bytes() &&
         b.data < a.data + a.bytes();
}

// Refuses outputs that would overwrite inputs which other ranks still read. `own(i, o)`: the pair
// that may be one and the same memory.
template <typename Own>
void check_overlap(const ThreadCall& call, Own own) {
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    for (size_t o = 0; o < call.outputs.size(); ++o) {
      const bool in_place = own(i, o) && call.inputs[i].data == call.outputs[o].data;
      FSDP_CHECK(ConfigError, in_place || !overlap(call.inputs[i], call.outputs[o]), call.name,
                 ": output ", o, " overlaps input ", i,
                 ". In place, a rank's input is its own slice of the output; else use separate "
                 "memory.");
    }
  }
}

// Whether an output of a reduce-scatter lies in an input that another rank still reads. Its own
// slice of the input is read by this rank alone.
bool needs_scratch(const ThreadCall& call, int rank) {
  const size_t num_ranks = call.outputs.empty() ? 1 : call.inputs.size() / call.outputs.size();
  for (size_t o = 0; o < call.outputs.size(); ++o) {
    for (size_t i = 0; i < call.inputs.size(); ++i) {
      const bool own_slice = i == o * num_ranks + static_cast<size_t>(rank) &&
                             call.inputs[i].data == call.outputs[o].data;
      if (!own_slice && overlap(call.inputs[i], call.outputs[o])) return true;
    }
  }
  return false;
}

void check_same(const ThreadCall& call, const Piece& a, const Piece& b, const char* a_name,
                const char* b_name) {
  FSDP_CHECK(ConfigError, a.extent == b.extent, call.name, ": ", a_name, " has ", a.extent.numel,
             " elements of ", a.extent.dtype, ", but ", b_name, " has ", b.extent.numel, " of ",
             b.extent.dtype, ".");
}

void check_length(const ThreadCall& call, const char* list, size_t found, size_t expected) {
  FSDP_CHECK(ConfigError, found == expected, call.name, ": expected ", expected, " tensors in ",
             list, ", found ", found, ".");
}

std::vector<Extent> extents_of(const std::vector<Piece>& pieces) {
  std::vector<Extent> extents;
  extents.reserve(pieces.size());
  for (const Piece& piece : pieces) extents.push_back(piece.extent);
  return extents;
}

void set_reduction(ThreadCall& call, const c10d::ReduceOp& op) {
  call.op = op.op_;
  for (const Piece& piece : call.inputs) check_reduction(call.name, op.op_, piece.extent.dtype);
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return;
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  FSDP_CHECK(ConfigError, supplement != nullptr, call.name,
             ": PREMUL_SUM without a factor; its supplement must be a NCCLPreMulSumSupplement.");
  call.factor = supplement->tensor_factor.defined() ? supplement->tensor_factor.item().toDouble()
                                                    : supplement->double_factor;
}

}  // namespace

ThreadBackend::ThreadBackend(std::shared_ptr<ThreadGroup> group, int rank)
    : c10d::Backend(rank, group->size()),
      group_(std::move(group)),
      timeout_(group_->room().timeout()) {}

void ThreadBackend::abort() {
  group_->room().abort(group_->job_ranks()[static_cast<size_t>(rank_)], "aborted");
}

ThreadCall ThreadBackend::new_call(std::string name, CallKind kind,
                                   std::chrono::milliseconds timeout) const {
  ThreadCall call;
  call.name = std::move(name);
  call.kind = kind;
  call.timeout = timeout.count() > 0 ? timeout : timeout_;
  return call;
}

void ThreadBackend::check_root(const ThreadCall& call, int64_t root) const {
  FSDP_CHECK(ConfigError, root >= 0 && root < size_, call.name, ": root ", root,
             " is not a rank of a group of ", size_, ".");
}

std::shared_ptr<DeviceCall> ThreadBackend::on_device(const ThreadCall& call) {
  if (call.tensors.empty() || call.tensors[0].is_cpu()) return nullptr;
  constexpr size_t kMaxPhases = 2;
  const c10::Device device = call.tensors[0].device();
  auto stream = streams_.find(device);
  if (stream == streams_.end()) {
    stream = streams_.emplace(device, new_stream(device, /*high_priority=*/true)).first;
  }
  return std::make_shared<DeviceCall>(DeviceCall{.device = device,
                                                 .stream = stream->second,
                                                 .ready = current_stream(device).record(),
                                                 .done = std::vector<Event>(kMaxPhases),
                                                 .scratch = {}});
}

ThreadBackend::WorkPtr ThreadBackend::issue(ThreadCall call, Tensors results) {
  ++num_calls_;
  call.on_device = on_device(call);
  const std::chrono::milliseconds timeout = call.timeout;
  return c10::make_intrusive<ThreadWork>(group_->join(rank_, std::move(call)), rank_, timeout,
                                         std::move(results));
}

ThreadBackend::WorkPtr ThreadBackend::issue_pair(ThreadCall call, int source, int destination,
                                                 int tag, Tensors results) {
  const int peer = source == rank_ ? destination : source;
  FSDP_CHECK(ConfigError, peer >= 0 && peer < size_ && source != destination, call.name, ": rank ",
             peer, " is not another rank of a group of ", size_, ".");
  const bool is_sender = source == rank_;
  const std::chrono::milliseconds timeout = call.timeout;
  call.on_device = on_device(call);
  auto op = group_->join_pair(source, destination, tag, is_sender, std::move(call));
  return c10::make_intrusive<ThreadWork>(std::move(op), is_sender ? 0 : 1, timeout,
                                         std::move(results));
}

ThreadBackend::WorkPtr ThreadBackend::broadcast(Tensors& tensors,
                                                const c10d::BroadcastOptions& options) {
  ThreadCall call = new_call("broadcast", CallKind::kBroadcast, options.timeout);
  check_root(call, options.rootRank);
  call.root = static_cast<int>(options.rootRank);
  const bool receives = rank_ != call.root;
  take_all(call, tensors, /*is_output=*/receives);
  (receives ? call.inputs : call.outputs) = receives ? call.outputs : call.inputs;
  call.extents = extents_of(call.inputs);
  return issue(std::move(call), tensors);
}

ThreadBackend::WorkPtr ThreadBackend::reduce_in_place(ThreadCall call, const Tensors& tensors,
                                                      const c10d::ReduceOp& op) {
  take_all(call, tensors, /*is_output=*/true);
  call.inputs = call.outputs;
  call.extents = extents_of(call.inputs);
  set_reduction(call, op);
  return issue(std::move(call), tensors);
}

ThreadBackend::WorkPtr ThreadBackend::allreduce(Tensors& tensors,
                                                const c10d::AllreduceOptions& options) {
  ThreadCall call = new_call("allreduce", CallKind::kAllReduce, options.timeout);
  return reduce_in_place(std::move(call), tensors, options.reduceOp);
}

ThreadBackend::WorkPtr ThreadBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  ThreadCall call = new_call("allreduce_coalesced", CallKind::kAllReduce, options.timeout);
  return reduce_in_place(std::move(call), tensors, options.reduceOp);
}

ThreadBackend::WorkPtr ThreadBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  ThreadCall call = new_call("reduce", CallKind::kReduce, options.timeout);
  check_root(call, options.rootRank);
  call.root = static_cast<int>(options.rootRank);
  return reduce_in_place(std::move(call), tensors, options.reduceOp);
}

ThreadBackend::WorkPtr ThreadBackend::all_gather_lists(std::string name, const TensorLists& outputs,
                                                       const Tensors& inputs,
                                                       std::chrono::milliseconds timeout) {
  ThreadCall call = new_call(std::move(name), CallKind::kAllGather, timeout);
  const size_t n = static_cast<size_t>(size_);
  check_length(call, "outputs", outputs.size(), inputs.size());
  take_all(call, inputs, /*is_output=*/false);
  Tensors results;
  for (size_t k = 0; k < inputs.size(); ++k) {
    check_length(call, "a list of outputs", outputs[k].size(), n);
    take_all(call, outputs[k], /*is_output=*/true);
    results.insert(results.end(), outputs[k].begin(), outputs[k].end());
    check_same(call, call.inputs[k], call.outputs[k * n + static_cast<size_t>(rank_)], "the input",
               "the output for this rank");
  }
  check_overlap(call, [&](size_t i, size_t o) { return o == i * n + static_cast<size_t>(rank_); });
  call.extents = extents_of(call.outputs);
  return issue(std::move(call), std::move(results));
}

ThreadBackend::WorkPtr ThreadBackend::all_gather_flat(std::string name, const Tensors& outputs,
                                                      const Tensors& inputs,
                                                      std::chrono::milliseconds timeout) {
  ThreadCall call = new_call(std::move(name), CallKind::kAllGather, timeout);
  check_length(call, "outputs", outputs.size(), inputs.size());
  const size_t n = static_cast<size_t>(size_);
  take_all(call, inputs, /*is_output=*/false);
  for (size_t k = 0; k < inputs.size(); ++k) {
    const Extent& input = call.inputs[k].extent;
    FSDP_CHECK(ConfigError,
               outputs[k].scalar_type() == input.dtype && outputs[k].numel() == input.numel * size_,
               call.name, ": the input has ", input.numel, " elements of ", input.dtype,
               ", so that the output of ", size_, " ranks must have ", input.numel * size_,
               "; found ", outputs[k].numel(), " of ", outputs[k].scalar_type(), ".");
    take_cut(call, outputs[k], /*is_output=*/true, size_);
  }
  check_overlap(call, [&](size_t i, size_t o) { return o == i * n + static_cast<size_t>(rank_); });
  call.extents = extents_of(call.inputs);
  return issue(std::move(call), outputs);
}

ThreadBackend::WorkPtr ThreadBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions& options) {
  return all_gather_lists("allgather", outputs, inputs, options.timeout);
}

ThreadBackend::WorkPtr ThreadBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::AllgatherOptions& options) {
  return all_gather_flat("_allgather_base", {output}, {input}, options.timeout);
}

ThreadBackend::WorkPtr ThreadBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  return all_gather_lists("allgather_coalesced", outputs, inputs, options.timeout);
}

ThreadBackend::WorkPtr ThreadBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return all_gather_flat("allgather_into_tensor_coalesced", outputs, inputs, options.timeout);
}

ThreadBackend::WorkPtr ThreadBackend::gather(TensorLists& outputs, Tensors& inputs,
                                             const c10d::GatherOptions& options) {
  ThreadCall call = new_call("gather", CallKind::kGather, options.timeout);
  check_root(call, options.rootRank);
  call.root = static_cast<int>(options.rootRank);
  check_length(call, "inputs", inputs.size(), 1);
  take_all(call, inputs, /*is_output=*/false);
  call.extents = extents_of(call.inputs);
  if (rank_ != call.root) return issue(std::move(call), {});
  check_length(call, "lists of outputs", outputs.size(), 1);
  check_length(call, "outputs", outputs[0].size(), static_cast<size_t>(size_));
  take_all(call, outputs[0], /*is_output=*/true);
  for (const Piece& output : call.outputs) {
    check_same(call, call.inputs[0], output, "the input", "an output");
  }
  check_overlap(call, [&](size_t, size_t o) { return o == static_cast<size_t>(rank_); });
  return issue(std::move(call), outputs[0]);
}

ThreadBackend::WorkPtr ThreadBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                              const c10d::ScatterOptions& options) {
  ThreadCall call = new_call("scatter", CallKind::kScatter, options.timeout);
  check_root(call, options.rootRank);
  call.root = static_cast<int>(options.rootRank);
  check_length(call, "outputs", outputs.size(), 1);
  take_all(call, outputs, /*is_output=*/true);
  call.extents = extents_of(call.outputs);
  if (rank_ != call.root) return issue(std::move(call), outputs);
  check_length(call, "lists of inputs", inputs.size(), 1);
  check_length(call, "inputs", inputs[0].size(), static_cast<size_t>(size_));
  take_all(call, inputs[0], /*is_output=*/false);
  for (const Piece& input : call.inputs) {
    check_same(call, call.outputs[0], input, "the output", "an input");
  }
  check_overlap(call, [&](size_t i, size_t) { return i == static_cast<size_t>(rank_); });
  return issue(std::move(call), outputs);
}

ThreadBackend::WorkPtr ThreadBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  ThreadCall call = new_call("reduce_scatter", CallKind::kReduceScatter, options.timeout);
  const size_t n = static_cast<size_t>(size_);
  check_length(call, "lists of inputs", inputs.size(), outputs.size());
  take_all(call, outputs, /*is_output=*/true);
  for (size_t k = 0; k < outputs.size(); ++k) {
    check_length(call, "a list of inputs", inputs[k].size(), n);
    take_all(call, inputs[k], /*is_output=*/false);
    check_same(call, call.outputs[k], call.inputs[k * n + static_cast<size_t>(rank_)], "the output",
               "the input for this rank");
  }
  set_reduction(call, options.reduceOp);
  call.extents = extents_of(call.inputs);
  call.through_scratch = needs_scratch(call, rank_);
  return issue(std::move(call), outputs);
}

ThreadBackend::WorkPtr ThreadBackend::reduce_scatter_flat(
    std::string name, const Tensors& outputs, const Tensors& inputs,
    const c10d::ReduceScatterOptions& options) {
  ThreadCall call = new_call(std::move(name), CallKind::kReduceScatter, options.timeout);
  check_length(call, "inputs", inputs.size(), outputs.size());
  take_all(call, outputs, /*is_output=*/true);
  for (size_t k = 0; k < outputs.size(); ++k) {
    const Extent& output = call.outputs[k].extent;
    FSDP_CHECK(ConfigError,
               inputs[k].scalar_type() == output.dtype && inputs[k].numel() == output.numel * size_,
               call.name, ": the output has ", output.numel, " elements of ", output.dtype,
               ", so that the input of ", size_, " ranks must have ", output.numel * size_,
               "; found ", inputs[k].numel(), " of ", inputs[k].scalar_type(), ".");
    take_cut(call, inputs[k], /*is_output=*/false, size_);
  }
  set_reduction(call, options.reduceOp);
  call.extents = extents_of(call.outputs);
  call.through_scratch = needs_scratch(call, rank_);
  return issue(std::move(call), outputs);
}

ThreadBackend::WorkPtr ThreadBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return reduce_scatter_flat("_reduce_scatter_base", {output}, {input}, options);
}

ThreadBackend::WorkPtr ThreadBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return reduce_scatter_flat("reduce_scatter_tensor_coalesced", outputs, inputs, options);
}

ThreadBackend::WorkPtr ThreadBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                    std::vector<int64_t>& output_splits,
                                                    std::vector<int64_t>& input_splits,
                                                    const c10d::AllToAllOptions& options) {
  ThreadCall call = new_call("alltoall_base", CallKind::kAllToAll, options.timeout);
  take_split(call, input, /*is_output=*/false, input_splits, size_);
  take_split(call, output, /*is_output=*/true, output_splits, size_);
  check_overlap(call, [](size_t, size_t) { return false; });
  return issue(std::move(call), {output});
}

ThreadBackend::WorkPtr ThreadBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                               const c10d::AllToAllOptions& options) {
  ThreadCall call = new_call("alltoall", CallKind::kAllToAll, options.timeout);
  check_length(call, "inputs", inputs.size(), static_cast<size_t>(size_));
  check_length(call, "outputs", outputs.size(), static_cast<size_t>(size_));
  take_all(call, inputs, /*is_output=*/false);
  take_all(call, outputs, /*is_output=*/true);
  check_overlap(call, [](size_t, size_t) { return false; });
  return issue(std::move(call), outputs);
}

ThreadBackend::WorkPtr ThreadBackend::send(Tensors& tensors, int destination, int tag) {
  ThreadCall call = new_call("send", CallKind::kPointToPoint, c10d::kUnsetTimeout);
  check_length(call, "tensors", tensors.size(), 1);
  take_all(call, tensors, /*is_output=*/false);
  call.extents = extents_of(call.inputs);
  return issue_pair(std::move(call), rank_, destination, tag, {});
}

ThreadBackend::WorkPtr ThreadBackend::recv(Tensors& tensors, int source, int tag) {
  ThreadCall call = new_call("recv", CallKind::kPointToPoint, c10d::kUnsetTimeout);
  check_length(call, "tensors", tensors.size(), 1);
  take_all(call, tensors, /*is_output=*/true);
  call.extents = extents_of(call.outputs);
  return issue_pair(std::move(call), source, rank_, tag, tensors);
}

ThreadBackend::WorkPtr ThreadBackend::barrier(const c10d::BarrierOptions& options) {
  return issue(new_call("barrier", CallKind::kBarrier, options.timeout), {});
}

c10::intrusive_ptr<c10d::Backend> ThreadBackend::split(
    const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>&) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank_);
  if (found == ranks.end()) return nullptr;
  auto backend = c10::make_intrusive<ThreadBackend>(group_->split(rank_, ranks),
                                                    static_cast<int>(found - ranks.begin()));
  backend->timeout_ = timeout_;
  return backend;
}

}  // namespace fsdp
