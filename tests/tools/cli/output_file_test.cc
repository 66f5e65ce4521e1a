// Of a long file all but the last pieces are on the drive before the end asks for it, so that the
// fsync there is short: other ranks wait for it.
#include "tools/cli/output_file.h"

#include <linux/fiemap.h>
#include <linux/fs.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/temp_directory.h"

namespace sluice {
namespace {

constexpr std::uint64_t kMebibyte = 1 << 20;

// How many bytes of the first `length_bytes` have no place on the drive yet; -1 where the file
// system does not tell.
std::int64_t unplaced_bytes(int descriptor, std::uint64_t length_bytes) {
  constexpr std::uint32_t kExtents = 512;
  std::vector<std::uint64_t> memory(
      (sizeof(fiemap) + kExtents * sizeof(fiemap_extent)) / sizeof(std::uint64_t) + 1);
  auto* const map = reinterpret_cast<fiemap*>(memory.data());
  map->fm_length = length_bytes;
  map->fm_extent_count = kExtents;
  if (::ioctl(descriptor, FS_IOC_FIEMAP, map) != 0) return -1;
  const auto* const extents = reinterpret_cast<const fiemap_extent*>(
      reinterpret_cast<const std::byte*>(map) + offsetof(fiemap, fm_extents));
  std::uint64_t placed_bytes = 0;
  for (std::uint32_t i = 0; i < map->fm_mapped_extents; ++i) {
    const fiemap_extent& extent = extents[i];
    if ((extent.fe_flags & FIEMAP_EXTENT_DELALLOC) != 0 || extent.fe_logical >= length_bytes)
      continue;
    placed_bytes += std::min(extent.fe_length, length_bytes - extent.fe_logical);
  }
  return static_cast<std::int64_t>(length_bytes - placed_bytes);
}

TEST(OutputFile, SendsLongFilesToTheDriveAsTheyGrow) {
  const test::TempDirectory folder;
  OutputFile output("--save", folder.path() + "/model");
  const std::string piece(kMebibyte, 'x');
  for (int i = 0; i < 160; ++i) output.write(piece);
  const std::int64_t early = unplaced_bytes(output.descriptor(), 128 * kMebibyte);
  const std::int64_t all = unplaced_bytes(output.descriptor(), 160 * kMebibyte);
  if (early < 0) GTEST_SKIP() << "this file system does not tell where a file lies";
  EXPECT_EQ(early, 0) << "of 160 MiB the first 128 wait for the end (all in all " << all << ")";
}

}  // namespace
}  // namespace sluice
