#pragma once

#include <optional>
#include <utility>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace fsdp {

/// Whether work on this type of device is put on streams. On CPU it runs where it is called, and
/// all of this file's operations do nothing.
[[nodiscard]] bool has_streams(c10::DeviceType device_type);

/// A point in the work of a stream. Empty on CPU and until recorded; waiting for it then is free.
class Event {
 public:
  Event() = default;
  explicit Event(c10::Event event) : event_(std::move(event)) {}
  Event(Event&&) = default;
  Event& operator=(Event&&) = default;

  [[nodiscard]] bool recorded() const { return event_.has_value(); }
  /// Blocks the host until the work before the event is done.
  void synchronize() const;
  /// Whether the work before it is done.
  [[nodiscard]] bool query() const;

 private:
  friend class Stream;
  std::optional<c10::Event> event_;
};

/// A stream of a device: a copyable name, not an owner.
class Stream {
 public:
  explicit Stream(c10::Stream stream) : stream_(stream) {}

  [[nodiscard]] Event record() const;
  /// Work put on this stream from now on waits for `event`.
  void wait(const Event& event) const;
  /// Work put on this stream from now on waits for all that `other` has now.
  void wait(const Stream& other) const;

  [[nodiscard]] const c10::Stream& raw() const { return stream_; }
  friend bool operator==(const Stream& a, const Stream& b) { return a.stream_ == b.stream_; }

 private:
  c10::Stream stream_;
};

[[nodiscard]] Stream current_stream(c10::Device device);
/// A stream of its own; `high_priority` where the device knows priorities.
[[nodiscard]] Stream new_stream(c10::Device device, bool high_priority);
/// The device with an index: the current one of its type if `device` has none.
[[nodiscard]] c10::Device with_index(c10::Device device);

/// Makes a stream the current one of its device until the end of the scope.
class StreamGuard {
 public:
  explicit StreamGuard(const Stream& stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  std::optional<c10::Stream> previous_;
};

}  // namespace fsdp
