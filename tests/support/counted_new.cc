// A file of its own: where a compiler saw these beside their callers, it would take std::free() for
// a mistake.
#include "tests/support/counted_new.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

std::atomic<bool> is_counting{false};
std::atomic<std::uint64_t> count{0}, total_bytes{0}, largest_bytes{0};

void* allocate(std::size_t size_bytes, std::size_t alignment_bytes) {
  if (is_counting) {
    ++count;
    total_bytes += size_bytes;
    std::uint64_t most = largest_bytes;
    while (most < size_bytes && !largest_bytes.compare_exchange_weak(most, size_bytes)) continue;
  }
  const std::size_t rounded = (size_bytes + alignment_bytes - 1) & ~(alignment_bytes - 1);
  void* const memory = std::aligned_alloc(alignment_bytes, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// The other forms come to these.
void* operator new(std::size_t size_bytes) {
  return allocate(size_bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
void* operator new(std::size_t size_bytes, std::align_val_t alignment) {
  return allocate(size_bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace sluice::test {

void count_allocations() {
  count = total_bytes = largest_bytes = 0;
  is_counting = true;
}

Allocations allocations() {
  is_counting = false;
  return {.count = count, .bytes = total_bytes, .largest_bytes = largest_bytes};
}

}  // namespace sluice::test
