#include "shard/buffer_pool.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "shard/storage.h"

namespace fsdp {
namespace {

// An advice: where the system has no huge pages, or keeps them for others, nothing changes.
void ask_for_huge_pages(void* data, size_t num_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + num_bytes) / kHugePage * kHugePage;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

at::DataPtr BufferPool::allocate(size_t num_bytes) {
  if (num_bytes >= kMinKeptBytes) {
    // The latest: its pages are the likeliest to be in a cache.
    const auto found = std::find_if(kept_.rbegin(), kept_.rend(),
                                    [&](const Kept& kept) { return kept.num_bytes == num_bytes; });
    if (found != kept_.rend()) {
      at::DataPtr bytes = std::move(found->bytes);
      kept_.erase(std::next(found).base());
      return bytes;
    }
  }
  const c10::DeviceGuard on_device(device_);
  at::DataPtr bytes = c10::GetAllocator(device_.type())->allocate(num_bytes);
  if (device_.is_cpu()) ask_for_huge_pages(bytes.get(), num_bytes);
  return bytes;
}

at::Tensor BufferPool::allocate(int64_t numel, at::ScalarType dtype) {
  if (!device_.is_cpu()) {
    return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device_));
  }
  const size_t num_bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  const at::Storage storage(c10::Storage::use_byte_size_t(), num_bytes, allocate(num_bytes),
                            /*allocator=*/nullptr, /*resizable=*/false);
  return tensor_over(storage, dtype, 0, {numel});
}

void BufferPool::give_back(at::DataPtr bytes, size_t num_bytes) {
  if (!bytes || !device_.is_cpu() || num_bytes < kMinKeptBytes) return;
  if (kept_.size() == kMaxKept) kept_.erase(kept_.begin());
  kept_.push_back({.bytes = std::move(bytes), .num_bytes = num_bytes});
}

void BufferPool::give_back(at::Tensor tensor) {
  if (!tensor.defined() || !device_.is_cpu()) return;
  const at::Storage storage = tensor.storage();
  if (tensor.use_count() != 1 || storage.use_count() != 2) return;  // the tensor's, and ours
  const size_t num_bytes = storage.nbytes();
  give_back(storage.set_data_ptr(at::DataPtr(nullptr, device_)), num_bytes);
}

size_t BufferPool::kept_bytes() const {
  size_t total = 0;
  for (const Kept& kept : kept_) total += kept.num_bytes;
  return total;
}

}  // namespace fsdp
