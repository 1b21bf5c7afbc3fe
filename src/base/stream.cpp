#include "base/stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace fsdp {
namespace {

c10::impl::VirtualGuardImpl guard_of(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

}  // namespace

bool has_streams(c10::DeviceType device_type) {
  return device_type != c10::DeviceType::CPU && device_type != c10::DeviceType::Meta;
}

void Event::synchronize() const {
  if (event_) event_->synchronize();
}

bool Event::query() const { return !event_ || event_->query(); }

Event Stream::record() const {
  Event event;
  if (has_streams(stream_.device_type())) {
    event.event_.emplace(stream_.device_type());
    event.event_->record(stream_);
  }
  return event;
}

void Stream::wait(const Event& event) const {
  if (event.event_) event.event_->block(stream_);
}

void Stream::wait(const Stream& other) const {
  if (!(stream_ == other.stream_)) wait(other.record());
}

Stream current_stream(c10::Device device) {
  if (!has_streams(device.type())) return Stream(c10::Stream(c10::Stream::DEFAULT, device));
  return Stream(guard_of(device).getStream(device));
}

Stream new_stream(c10::Device device, bool high_priority) {
  if (!has_streams(device.type())) return Stream(c10::Stream(c10::Stream::DEFAULT, device));
  return Stream(guard_of(device).getStreamFromGlobalPool(device, high_priority));
}

c10::Device with_index(c10::Device device) {
  if (device.has_index() || !has_streams(device.type())) return device;
  return guard_of(device).getDevice();
}

StreamGuard::StreamGuard(const Stream& stream) {
  if (has_streams(stream.raw().device_type())) {
    previous_ = guard_of(stream.raw().device()).exchangeStream(stream.raw());
  }
}

StreamGuard::~StreamGuard() {
  if (previous_) guard_of(previous_->device()).exchangeStream(*previous_);
}

}  // namespace fsdp
