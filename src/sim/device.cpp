#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

#include "fsdp/sim.h"
#include "sim/generator.h"
#include "sim/kernels.h"
#include "sim/machine.h"
#include "sim/memory.h"

// What c10 and ATen ask of a device: the current one, its streams and events, memory, generators.
namespace fsdp::sim {
namespace {

constexpr int kMaxDevices = 127;  // DeviceIndex is int8_t

Machine& machine() { return Machine::get(); }

class NpuGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kNpu; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override { return {kNpu, machine().host().device}; }
  void setDevice(c10::Device device) const override {
    FSDP_CHECK(ConfigError, device.index() < machine().num_devices(), "sim: there is no device ",
               device, ": sim::enable() made ", machine().num_devices(), " of them.");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) machine().host().device = device.index();
  }

  c10::Stream getStream(c10::Device device) const override {
    return machine().current_stream(index_of(device)).id;
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, index_of(device)), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return machine().pool_stream(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return machine().pool_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream previous = machine().current_stream(stream.device_index()).id;
    machine().host().streams.at(static_cast<size_t>(stream.device_index())) =
        &machine().stream(stream);
    return previous;
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    machine().synchronize(machine().stream(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    machine().synchronize_device(device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new EventState;
    machine().record(*static_cast<EventState*>(*event), machine().stream(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    machine().wait(machine().stream(stream), *static_cast<EventState*>(event));
  }
  // A query that may say "not yet" for ever would hang who polls: it runs the work instead.
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) machine().synchronize(*static_cast<EventState*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex device) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "sim: events have no time.");
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    DeviceMemory::get().record_stream(data.get(), machine().stream(stream));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(machine().num_devices());
  }

 private:
  static c10::DeviceIndex index_of(const c10::Device& device) {
    return device.has_index() ? device.index() : machine().host().device;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, NpuGuard);

class NpuHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return machine().num_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return isAvailable(); }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(machine().num_devices());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    guard_.setDevice({kNpu, device});
  }
  c10::DeviceIndex getCurrentDevice() const override { return machine().host().device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return guard_.exchangeDevice({kNpu, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return NpuGenerator::default_of(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<NpuGenerator>(device < 0 ? machine().host().device : device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    return DeviceMemory::get().device_of(data);
  }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::get().contains(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::get(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    DeviceMemory& memory = DeviceMemory::get();
    const c10::Device device = storage.device();
    const c10::Device previous = guard_.exchangeDevice(device);
    c10::DataPtr data = memory.allocate(num_bytes);
    const size_t kept = std::min(num_bytes, storage.nbytes());
    if (kept > 0) memory.copy_data(data.get(), storage.data(), kept);
    guard_.setDevice(previous);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
  }

 private:
  NpuGuard guard_;
};

struct RangeContext final : at::ObserverContext {};

// Ranges that the program opens (record_function), so that reports say where they are.
void follow_ranges() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction& range) -> std::unique_ptr<at::ObserverContext> {
            machine().host().ranges.emplace_back(range.name());
            return std::make_unique<RangeContext>();
          },
          [](const at::RecordFunction& range, at::ObserverContext* context) {
            HostThread& thread = machine().host();
            if (context == nullptr || thread.ranges.empty()) return;
            thread.last_range = std::move(thread.ranges.back());
            thread.ranges.pop_back();
          })
          .scopes({at::RecordScope::USER_SCOPE}));
}

}  // namespace

void enable(int num_devices) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  FSDP_CHECK(ConfigError, num_devices >= 1 && num_devices <= kMaxDevices,
             "sim::enable: the number of devices must be 1 to ", kMaxDevices, ", found ",
             num_devices, ".");
  const int enabled = machine().num_devices();
  FSDP_CHECK(ConfigError, enabled == 0 || enabled == num_devices, "sim::enable: there are ",
             enabled, " devices already, found ", num_devices,
             ": the number cannot change. Enable it once, at the program's start.");
  if (enabled > 0) return;
  c10::register_privateuse1_backend("npu");
  c10::SetAllocator(kNpu, &DeviceMemory::get());
  at::RegisterPrivateUse1HooksInterface(new NpuHooks);
  machine().enable(num_devices);
  follow_ranges();
  use_cpu_kernels();
}

bool is_enabled() { return machine().num_devices() > 0; }

c10::Device device(int index) {
  FSDP_CHECK(ConfigError, index >= 0 && index < machine().num_devices(), "sim::device: no device ",
             index, " of ", machine().num_devices(), ".");
  return {kNpu, static_cast<c10::DeviceIndex>(index)};
}

void set_execution(Execution execution) { machine().set_execution(execution); }
Execution execution() { return machine().execution(); }
void set_on_race(OnRace on_race) { machine().set_on_race(on_race); }
OnRace on_race() { return machine().on_race(); }
std::vector<Race> take_races() { return machine().take_races(); }

MemoryStats memory_stats(int device_index) { return DeviceMemory::get().stats(device_index); }
void reset_peak_memory_stats(int device_index) {
  DeviceMemory::get().reset_peak_stats(device_index);
}
void empty_cache() { DeviceMemory::get().empty_cache(); }
void synchronize(int device_index) {
  machine().synchronize_device(static_cast<c10::DeviceIndex>(device_index));
}

std::string Race::describe() const {
  const auto side = [](const Access& access) {
    const bool is_after = std::string_view(access.place).starts_with("after ");
    return c10::str(access.operation, " (", access.is_write ? "writes" : "reads", ") on ",
                    access.stream,
                    access.place.empty() ? ""
                    : is_after           ? ", "
                                         : ", in ",
                    access.place, access.thread.empty() ? "" : ", by thread ", access.thread);
  };
  return c10::str("sim: a race for ", num_bytes, " bytes.\n  first:  ", side(first),
                  "\n  second: ", side(second),
                  "\nNothing orders the second behind the first: let the second's stream wait for "
                  "an event recorded behind the first, or the host synchronise.");
}

struct Trace::State {
  std::shared_ptr<Machine::TraceLog> log = std::make_shared<Machine::TraceLog>();
};

Trace::Trace() : state_(std::make_shared<State>()) { machine().attach(state_->log); }
Trace::~Trace() { machine().detach(state_->log); }

std::vector<Launch> Trace::launches() const {
  const std::lock_guard lock(machine().mutex());
  std::vector<Launch> launches;
  for (const auto& entry : state_->log->entries) launches.push_back(entry.launch);
  return launches;
}

bool Trace::is_ordered(size_t first, size_t second) const {
  const std::lock_guard lock(machine().mutex());
  const auto& entries = state_->log->entries;
  return entries.at(second).clock.covers(entries.at(first).moment);
}

}  // namespace fsdp::sim
