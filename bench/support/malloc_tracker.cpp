// To be preloaded: counts the bytes that malloc has given out. malloc_tracker_live(), _peak() and
// _reset_peak() are found with dlsym. Usable sizes, so the allocator's rounding is in them.

#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace {

std::atomic<int64_t> live_bytes{0}, peak_bytes{0};

void* counted(void* block) {
  if (block == nullptr) return nullptr;
  const auto bytes = static_cast<int64_t>(::malloc_usable_size(block));
  const int64_t live = live_bytes += bytes;
  int64_t peak = peak_bytes;
  while (live > peak && !peak_bytes.compare_exchange_weak(peak, live)) {
  }
  return block;
}

void uncount(void* block) {
  if (block != nullptr) live_bytes -= static_cast<int64_t>(::malloc_usable_size(block));
}

}  // namespace

extern "C" {

void* __libc_malloc(size_t bytes);
void __libc_free(void* block);
void* __libc_calloc(size_t number, size_t bytes);
void* __libc_realloc(void* block, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) { return counted(__libc_malloc(bytes)); }
void* calloc(size_t number, size_t bytes) { return counted(__libc_calloc(number, bytes)); }
void* memalign(size_t alignment, size_t bytes) {
  return counted(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** block, size_t alignment, size_t bytes) {
  void* const found = memalign(alignment, bytes);
  if (found == nullptr) return ENOMEM;
  *block = found;
  return 0;
}
void* realloc(void* block, size_t bytes) {
  uncount(block);
  void* const found = __libc_realloc(block, bytes);
  counted(found == nullptr && bytes != 0 ? block : found);  // that failed: the old one is there
  return found;
}
void free(void* block) {
  uncount(block);
  __libc_free(block);
}

int64_t malloc_tracker_live() { return live_bytes; }
int64_t malloc_tracker_peak() { return peak_bytes; }
int64_t malloc_tracker_reset_peak() {
  peak_bytes = live_bytes.load();
  return 0;
}

}  // extern "C"
