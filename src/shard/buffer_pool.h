#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace fsdp {

/// The memory of gathers and reductions of one root, on one device.
///
/// On CPU the bytes of the last that were given back serve the next of the same size, since the
/// first touch of fresh pages costs five times the copy into them; fresh bytes are asked for as
/// huge pages, where it still costs half as much again. On other devices the caching allocator does
/// this, and nothing is kept here. One rank's thread. Memory:  keeps at most kMaxKept buffers of
/// kMinKeptBytes or more: what one gather and one
///          reduction need, which backward, at its peak, holds anyway.
class BufferPool {
 public:
  static constexpr size_t kMaxKept = 2;
  static constexpr size_t kMinKeptBytes = size_t{64} << 10;

  explicit BufferPool(c10::Device device) : device_(device) {}

  /// Uninitialised bytes. Streams: of the current stream of the device.
  [[nodiscard]] at::DataPtr allocate(size_t num_bytes);
  /// The same as a tensor [numel] that is nobody's view.
  [[nodiscard]] at::Tensor allocate(int64_t numel, at::ScalarType dtype);
  /// Bytes that nobody uses any more.
  void give_back(at::DataPtr bytes, size_t num_bytes);
  /// Those of a tensor, if nothing else holds the tensor or its storage.
  void give_back(at::Tensor tensor);
  /// Frees what is kept.
  void release() { kept_.clear(); }
  [[nodiscard]] size_t kept_bytes() const;

 private:
  struct Kept {
    at::DataPtr bytes;
    size_t num_bytes;
  };

  c10::Device device_;
  std::vector<Kept> kept_;  // oldest first
};

}  // namespace fsdp
