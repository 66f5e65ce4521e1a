#include "base/aligned_buffer.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/topology.h"

namespace sluice {
namespace {

TEST(AlignedBuffer, IsAlignedAndZeroFilled) {
  for (const std::uint64_t size_bytes :
       {std::uint64_t{1}, std::uint64_t{4095}, 4_KiB, 2_MiB - 1, 2_MiB, 2_MiB + 1, 7_MiB + 3}) {
    const AlignedBuffer buffer(size_bytes, "test");
    const auto address = reinterpret_cast<std::uintptr_t>(buffer.data());
    EXPECT_TRUE(is_aligned(address, size_bytes >= 2_MiB ? kHugePageBytes : kPageBytes));
    EXPECT_EQ(buffer.size_bytes(), size_bytes);
    EXPECT_EQ(buffer.span().size(), size_bytes);
    EXPECT_TRUE(std::all_of(buffer.span().begin(), buffer.span().end(),
                            [](std::byte byte) { return byte == std::byte{0}; }));
    std::memset(buffer.data(), 0xff, size_bytes);  // all of it is there
  }
}

// A child, such as a loader of data, neither keeps its pages nor makes the parent copy them.
TEST(AlignedBuffer, IsNotInAForkedChild) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's memory in a child may lie where the buffer was";
#endif
  for (const std::uint64_t size_bytes : {4_KiB, 4_MiB}) {
    const AlignedBuffer buffer(size_bytes, "test");
    const pid_t child = ::fork();
    ASSERT_NE(child, -1);
    if (child == 0) {
      unsigned char is_resident = 0;
      const bool is_mapped = ::mincore(buffer.data(), 1, &is_resident) == 0;
      ::_exit(is_mapped ? 1 : 0);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

// Clearing the pages of a state takes one thread seconds.
TEST(AlignedBuffer, ThreadsTouchALargeOneThroughout) {
  const auto faults = [] {
    rusage used{};
    EXPECT_EQ(::getrusage(RUSAGE_THREAD, &used), 0);
    return used.ru_minflt;
  };
  const std::uint64_t size_bytes = 130_MiB + 5;
  std::vector<unsigned char> is_resident(div_ceil(size_bytes, kPageBytes));
  const AlignedBuffer first(size_bytes, "looks at the machine, which takes pages, too");
  const long before = faults();
  const AlignedBuffer buffer(size_bytes, "test");
  const long own = faults() - before;
  ASSERT_EQ(::mincore(buffer.data(), size_bytes, is_resident.data()), 0);
  EXPECT_TRUE(std::ranges::all_of(is_resident, [](unsigned char page) { return (page & 1) != 0; }));
#if defined(__SANITIZE_THREAD__)
  return;  // its shadow memory has page faults, too
#endif
  if (topology().granted_cores > 1) {
    EXPECT_LT(own, 40) << "of " << size_bytes / kHugePageBytes << " huge pages at least";
  }
}

TEST(AlignedBuffer, OfNoBytesIsEmpty) {
  const AlignedBuffer buffer(0, "test");
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_TRUE(buffer.span().empty());
}

TEST(AlignedBuffer, MovesItsMemory) {
  AlignedBuffer first(8_KiB, "first");
  std::byte* const memory = first.data();
  memory[8191] = std::byte{42};
  AlignedBuffer second(std::move(first));
  EXPECT_EQ(second.data(), memory);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move): emptied, as promised
  EXPECT_EQ(first.size_bytes(), 0u);
  AlignedBuffer third(4_KiB, "third");
  third = std::move(second);
  EXPECT_EQ(third.data(), memory);
  EXPECT_EQ(third.size_bytes(), 8_KiB);
  EXPECT_EQ(third.data()[8191], std::byte{42});
}

TEST(AlignedBuffer, RefusalNamesPurposeAndSize) {
  // The second and third would wrap around when rounded up to pages.
  for (const std::uint64_t size_bytes :
       {std::uint64_t{1} << 60, ~std::uint64_t{0}, ~std::uint64_t{0} - 2_MiB}) {
    try {
      const AlignedBuffer buffer(size_bytes, "the moon");
      ADD_FAILURE() << "mapped " << size_bytes;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      const std::string message = error.what();
      EXPECT_NE(message.find("the moon"), std::string::npos) << message;
      EXPECT_NE(message.find(format_bytes(size_bytes)), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace sluice
