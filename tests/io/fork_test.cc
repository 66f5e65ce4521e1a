// A forked child keeps nothing of its parent's files and rings: neither space on the drive, nor the
// memory that the kernel has pinned for a ring.
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <optional>
#include <string>

#include <gtest/gtest.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "io/direct_file.h"
#include "io/io_queue.h"
#include "tests/support/paused_child.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// A file and its ring, with memory that is registered, after a transfer.
struct Storage {
  explicit Storage(const std::string& directory)
      : memory(1_MiB, "a test"), file(DirectFile::create_scratch(directory, 4_MiB)) {
    const int descriptor = file.descriptor();
    queue = make_uring_queue({.depth = 8, .memory = memory.span(), .files = {&descriptor, 1}});
    IoRequest request{.kind = IoKind::kWrite,
                      .descriptor = descriptor,
                      .data = memory.data(),
                      .length_bytes = memory.size_bytes(),
                      .on_complete = [](IoRequest&) {}};
    IoRequest* const submitted = &request;
    queue->submit({&submitted, 1});
    queue->wait_idle();
    EXPECT_EQ(request.error, 0);
  }

  AlignedBuffer memory;
  DirectFile file;
  std::unique_ptr<IoQueue> queue;
};

std::optional<Storage> storage_in(const std::string& directory) {
  try {
    return std::optional<Storage>(std::in_place, directory);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    return std::nullopt;
  }
}

TEST(ForkedChild, HasNeitherFilesNorRings) {
  const TempDirectory directory;
  const auto before = descriptors_of(::getpid());
  const std::optional<Storage> storage = storage_in(directory.path());
  if (!storage) GTEST_SKIP() << "io_uring is not allowed here";
  EXPECT_NE(maps_of(::getpid()).find("[io_uring]"), std::string::npos);
  const PausedChild child;
  EXPECT_EQ(descriptors_of(child.pid()), before);
  EXPECT_EQ(maps_of(child.pid()).find("[io_uring]"), std::string::npos);
}

// The parent's queue works on, and both can be closed while the child lives.
TEST(ForkedChild, LeavesItsParentsStorageAlone) {
  const TempDirectory directory;
  std::optional<Storage> storage = storage_in(directory.path());
  if (!storage) GTEST_SKIP() << "io_uring is not allowed here";
  const PausedChild child;
  IoRequest request{.kind = IoKind::kRead,
                    .descriptor = storage->file.descriptor(),
                    .data = storage->memory.data(),
                    .length_bytes = storage->memory.size_bytes(),
                    .on_complete = [](IoRequest&) {}};
  IoRequest* const submitted = &request;
  storage->queue->submit({&submitted, 1});
  storage->queue->wait_idle();
  EXPECT_EQ(request.error, 0);
  storage.reset();
}

}  // namespace
}  // namespace sluice::test
