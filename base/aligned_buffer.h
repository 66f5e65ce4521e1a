// Host memory that O_DIRECT and DMA can use. The memory is page-aligned and zero-filled, and the
// constructor touches all of it. The memory has 2 MiB pages where the kernel grants such pages. A
// drive can be twice as fast if the memory is physically contiguous. The first touch of memory is
// 10 to 50 times slower than any later touch, so arenas are made once and divided into slots. On a
// machine with several NUMA nodes, the huge pages of one buffer are spread evenly over the nodes. A
// buffer has one owner, can be moved, and is not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace sluice {

inline constexpr std::uint64_t kPageBytes = 4096;
inline constexpr std::uint64_t kHugePageBytes = 2u << 20;

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  // `purpose` names the buffer in the error message.
  // Fails with kOutOfMemory if the kernel refuses the mapping.
  AlignedBuffer(std::uint64_t size_bytes, std::string_view purpose);
  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;
  ~AlignedBuffer();

  std::byte* data() const { return data_; }
  std::uint64_t size_bytes() const { return size_bytes_; }
  std::span<std::byte> span() const { return {data_, size_bytes_}; }

 private:
  // These members are constant after construction. The mapping starts at or before data_, because
  // data_ is moved up to the start of a huge page.
  std::byte* mapping_ = nullptr;
  std::uint64_t mapping_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::uint64_t size_bytes_ = 0;
};

}  // namespace sluice
