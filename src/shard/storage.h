#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace fsdp {

/// Frees the bytes of a storage whose tensors live on: the module's members and what autograd
/// saved. Returns them: what the caller does not keep is free now.
///
/// The storage keeps its size; one of size 0 is left alone. An access to the data throws
/// `access_error` until the bytes are back. Streams: the bytes go back to the allocator on the
/// current stream.
at::DataPtr free_storage(const at::Storage& storage, const std::string& access_error);

/// A storage of `bytes` that has none yet: freed from the start.
[[nodiscard]] at::Storage make_freed_storage(int64_t bytes, c10::Device device,
                                             const std::string& access_error);

/// Whether make_freed_storage() made it: its bytes are a group's, which frees and fills it.
[[nodiscard]] bool is_group_storage(const at::Storage& storage);

/// Gives a freed storage the bytes of another of the same size, which is left without any.
/// Streams: the bytes will go back to the allocator on the stream that they were allocated on.
void move_bytes(const at::Storage& from, const at::Storage& to);

/// Gives a freed storage uninitialised bytes again, at whatever address. Does nothing if it has
/// any. Streams: allocated on the current stream of the storage's device.
void allocate_storage(const at::Storage& storage);
/// Gives a freed storage these bytes, of its size.
void set_bytes(const at::Storage& storage, at::DataPtr bytes);

/// Whether the storage has its bytes; one of size 0 always has.
[[nodiscard]] bool is_allocated(const at::Storage& storage);

/// A tensor over part of a storage that is nobody's view: a version counter of its own, no
/// autograd. Shapes: contiguous `sizes` at `offset` elements. The storage may be freed.
[[nodiscard]] at::Tensor tensor_over(const at::Storage& storage, at::ScalarType dtype,
                                     int64_t offset, at::IntArrayRef sizes);

}  // namespace fsdp
