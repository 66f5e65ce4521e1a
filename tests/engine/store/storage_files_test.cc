// Files on the storage paths for which the engine and the optimizer alone have a note, or an error.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <string>
#include <vector>

#include <sluice/detached_optimizer.h>
#include <sluice/engine.h>
#include <sluice/error.h>
#include <sluice/host_device.h>
#include <sluice/units.h>
#include "tests/support/expect_error.h"
#include "tests/support/refused_syscall.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace {

// If it is not 0, statx() says that it is the alignment.
std::atomic<std::uint32_t> said_alignment_bytes = 0;

}  // namespace

// Stands before the C library's function.
extern "C" int statx(int folder, const char* path, int flags, unsigned mask,
                     struct statx* answer) noexcept {
  const long result = ::syscall(SYS_statx, folder, path, flags, mask, answer);
#ifdef STATX_DIOALIGN
  if (const std::uint32_t bytes = said_alignment_bytes;
      bytes != 0 && (mask & STATX_DIOALIGN) != 0) {
    answer->stx_mask |= STATX_DIOALIGN;
    answer->stx_dio_mem_align = answer->stx_dio_offset_align = bytes;
  }
#endif
  return static_cast<int>(result);
}

namespace sluice::test {
namespace {

Config config_on(const std::string& path) {
  Config config = toy_config(path);
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.host_bytes = 1_MiB;
  return config;
}

std::vector<std::string> notes_of_engine(const Config& config) {
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  const Engine engine(config, toy_model(), *device);
  return engine.notes();
}

std::vector<std::string> notes_of_optimizer(const Config& config) {
  DetachedOptimizer optimizer(config, {{.name = "weight", .element_count = 100'000}});
  return optimizer.take_notes();
}

constexpr std::array kBoth{notes_of_engine, notes_of_optimizer};

TEST(StorageFiles, ThroughThePageCacheHasANote) {
  const TempDirectory directory;
  for (const auto notes_of : kBoth) {
    std::vector<std::string> notes;
    const bool filtered =
        run_with_refused({.number = SYS_fcntl, .error = EINVAL, .argument = 2, .bits = O_DIRECT},
                         [&] { notes = notes_of(config_on(directory.path())); });
    if (!filtered) GTEST_SKIP() << "seccomp filters are not allowed here";
    ASSERT_EQ(notes.size(), 1u);
    EXPECT_EQ(notes[0],
              "storage: " + directory.path() +
                  "/(scratch) goes through the page cache, because the file system refuses "
                  "O_DIRECT: this is slow, and displaces other memory; name folders on ext4 or XFS "
                  "on local drives in storage.paths");
  }
}

TEST(StorageFiles, ALargerAlignmentIsRefused) {
#ifndef STATX_DIOALIGN
  GTEST_SKIP() << "the system's headers do not know the alignment";
#endif
  const TempDirectory directory;
  for (const auto notes_of : kBoth) {
    said_alignment_bytes = 8192;
    const std::string message =
        expect_error(ErrorCode::kUnsupported, [&] { (void)notes_of(config_on(directory.path())); });
    said_alignment_bytes = 0;
    EXPECT_EQ(message, directory.path() +
                           "/(scratch): its file system asks for an alignment of 8.00 KiB, more "
                           "than the 4 KiB that Sluice lays blocks out for; use another path");
    EXPECT_TRUE(notes_of(config_on(directory.path())).empty());
  }
}

}  // namespace
}  // namespace sluice::test
