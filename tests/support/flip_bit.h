// The function damages a byte in a file. A second call restores the byte.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>

#include "base/aligned_buffer.h"

namespace sluice::test {

inline constexpr std::uint64_t kFlipPageBytes = 4096;

// Flips one bit of the page at `offset_bytes`. A second call flips the bit back.
inline void flip_bit(int descriptor, std::uint64_t offset_bytes) {
  const AlignedBuffer page(kFlipPageBytes, "a page");
  const auto offset = static_cast<off_t>(offset_bytes);
  ASSERT_EQ(::pread(descriptor, page.data(), kFlipPageBytes, offset), ssize_t{kFlipPageBytes});
  page.data()[7] ^= std::byte{1};
  ASSERT_EQ(::pwrite(descriptor, page.data(), kFlipPageBytes, offset), ssize_t{kFlipPageBytes});
}

}  // namespace sluice::test
