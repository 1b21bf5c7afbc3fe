#include "fsdp/comm_debug.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/RankLocal.hpp>

#include "base/record_inputs.h"

namespace fsdp {

/// The modes of one rank's thread, and what the observer that they share has seen. A callback of
/// RecordFunction is a plain function: this is where it finds whom to tell.
struct CommObserver {
  std::vector<CommDebugMode*> modes;
  std::vector<std::string> ranges;  // that are open, the innermost last
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;

  static CommObserver& of_this_rank() { return c10d::RankLocal<CommObserver>::get(); }

  void add(CommDebugMode* mode);
  void remove(CommDebugMode* mode);
  void count(const std::string& operation, int64_t bytes);
};

namespace {

constexpr std::string_view kNamespace = "c10d::";

int64_t bytes_of(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  }
  int64_t bytes = 0;
  if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) bytes += bytes_of(element);
  }
  return bytes;
}

// An asynchronous record, such as a backend makes of its work, ends on any thread: not a range.
bool is_range(const at::RecordFunction& record) {
  return record.scope() == at::RecordScope::USER_SCOPE && !record.isAsync();
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& record) {
  if (is_range(record)) {
    CommObserver::of_this_rank().ranges.emplace_back(record.name());
    return nullptr;
  }
  const std::string_view name = record.name();
  if (record.scope() != at::RecordScope::FUNCTION || !name.starts_with(kNamespace)) return nullptr;
  const std::string operation(name.substr(kNamespace.size()));
  int64_t bytes = 0;
  if (operation != "barrier" && operation != "monitored_barrier_") {  // their tensor says where
    for (const c10::IValue& input : inputs_of(record)) bytes = std::max(bytes, bytes_of(input));
  }
  CommObserver::of_this_rank().count(operation, bytes);
  return nullptr;
}

// Called for each begin(), also when the last mode ended in between.
void end(const at::RecordFunction& record, at::ObserverContext*) {
  if (is_range(record)) CommObserver::of_this_rank().ranges.pop_back();
}

}  // namespace

void CommObserver::add(CommDebugMode* mode) {
  if (modes.empty()) {
    handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&begin, &end)
            .needsInputs(true)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
  }
  modes.push_back(mode);
}

void CommObserver::remove(CommDebugMode* mode) {
  std::erase(modes, mode);
  if (modes.empty()) at::removeCallback(handle);
}

void CommObserver::count(const std::string& operation, int64_t bytes) {
  for (CommDebugMode* mode : modes) {
    CommCount& count = mode->by_range_[ranges.empty() ? "" : ranges.back()][operation];
    ++count.calls;
    count.bytes += bytes;
  }
}

CommDebugMode::CommDebugMode() { CommObserver::of_this_rank().add(this); }

CommDebugMode::~CommDebugMode() { CommObserver::of_this_rank().remove(this); }

int64_t CommDebugMode::count(const std::string& operation) const {
  return counts()[operation].calls;
}

int64_t CommDebugMode::bytes(const std::string& operation) const {
  return counts()[operation].bytes;
}

int64_t CommDebugMode::total() const {
  int64_t calls = 0;
  for (const auto& [name, count] : counts()) calls += count.calls;
  return calls;
}

int64_t CommDebugMode::num_kinds() const { return static_cast<int64_t>(counts().size()); }

CommDebugMode::Counts CommDebugMode::counts() const {
  Counts sum;
  for (const auto& [range, counts] : by_range_) {
    for (const auto& [operation, count] : counts) {
      sum[operation].calls += count.calls;
      sum[operation].bytes += count.bytes;
    }
  }
  return sum;
}

}  // namespace fsdp
