#include "base/aligned_buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/numa.h"
#include "base/topology.h"

namespace sluice {
namespace {

void touch(std::byte* data, std::uint64_t size_bytes) {
  for (std::uint64_t offset = 0; offset < size_bytes; offset += kPageBytes)
    *const_cast<volatile std::byte*>(data + offset) = std::byte{0};
}

// Clearing pages is slow, above all where a hypervisor has to find them first, and threads do it
// side by side. The memory of no machine keeps up with more threads than these.
constexpr std::uint64_t kTouchThreadsMax = 16;
// For fewer bytes a thread takes longer to start than it saves.
constexpr std::uint64_t kBytesPerTouchThread = 32_MiB;

// A large buffer's huge pages go to the NUMA nodes in turn, each touched by a thread of its node. A
// thread that works on the buffer later has the bandwidth of all nodes.
void touch_all(std::byte* data, std::uint64_t size_bytes) {
  const NumaNodes& nodes = NumaNodes::of_machine();
  const std::uint64_t thread_count = std::min<std::uint64_t>(
      {kTouchThreadsMax, topology().granted_cores, size_bytes / kBytesPerTouchThread});
  const bool is_bound = nodes.count() > 1 || nodes.is_part();
  if (size_bytes < nodes.count() * kHugePageBytes || (!is_bound && thread_count < 2))
    return touch(data, size_bytes);
  const std::uint64_t stride = nodes.count() * kHugePageBytes;
  std::vector<std::atomic<std::uint64_t>> next_bytes(nodes.count());  // by node
  const auto touch_stripe = [&](unsigned node) {
    std::uint64_t begin = 0;
    while ((begin = node * kHugePageBytes + next_bytes[node].fetch_add(stride)) < size_bytes)
      touch(data + begin, std::min(kHugePageBytes, size_bytes - begin));
  };
  std::vector<std::jthread> threads;
  for (unsigned i = 0; i < std::max<std::uint64_t>(thread_count, nodes.count()); ++i) {
    const unsigned node = i % nodes.count();
    try {
      threads.emplace_back([&, node] {
        nodes.bind_this_thread(node);
        touch_stripe(node);
      });
    } catch (const std::system_error&) {  // no thread left: the pages come from this node
      touch_stripe(node);
    }
  }
}

}  // namespace

AlignedBuffer::AlignedBuffer(std::uint64_t size_bytes, std::string_view purpose) {
  if (size_bytes == 0) return;
  // Below 2 MiB no huge page fits, and rounding up would waste more than the buffer holds.
  const bool huge = size_bytes >= kHugePageBytes;
  const std::uint64_t alignment = huge ? kHugePageBytes : kPageBytes;
  // Beyond the largest mapping the sum below could wrap around; the kernel refuses that one too.
  constexpr std::uint64_t kSizeMax = std::numeric_limits<std::int64_t>::max();
  mapping_bytes_ =
      align_up(std::min(size_bytes, kSizeMax), kPageBytes) + (huge ? kHugePageBytes : 0);
  void* mapping =
      ::mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) {
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format("cannot map {} of host memory for {}: {}; lower the budgets in \"memory\" "
                    "of the config, or free memory on the machine",
                    format_bytes(size_bytes), purpose, errno_text(errno)));
  }
  mapping_ = static_cast<std::byte*>(mapping);
  // A forked child has no use for the buffer, and would make this process copy each page that it
  // writes next. This is only advice to the kernel.
  (void)::madvise(mapping, mapping_bytes_, MADV_DONTFORK);
  const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
  data_ = mapping_ + (align_up(address, alignment) - address);
  size_bytes_ = size_bytes;
  // This, too, is only advice: a kernel without huge pages answers EINVAL, and the buffer works all
  // the same. The advised range ends at the last whole huge page, so that the resident size stays
  // the size that was asked for.
  if (huge) (void)::madvise(data_, size_bytes_ / kHugePageBytes * kHugePageBytes, MADV_HUGEPAGE);
  touch_all(data_, size_bytes_);
}

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapping_bytes_(std::exchange(other.mapping_bytes_, 0)),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

AlignedBuffer::~AlignedBuffer() {
  if (mapping_ != nullptr) ::munmap(mapping_, mapping_bytes_);
}

}  // namespace sluice
