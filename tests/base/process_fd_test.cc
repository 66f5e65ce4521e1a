#include "base/process_fd.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/memory_file.h"
#include "tests/support/holds_in_child.h"
#include "tests/support/paused_child.h"

namespace sluice::test {
namespace {

ProcessFd opened() {
  return ProcessFd::opened_by([] { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); });
}

bool is_open(int descriptor) {
  return ::fcntl(descriptor, F_GETFD) != -1;
}

TEST(ProcessFd, ClosesOnceAndMoves) {
  int raw = -1;
  {
    ProcessFd first = opened();
    raw = first.get();
    EXPECT_TRUE(first);
    ProcessFd second(std::move(first));
    EXPECT_FALSE(first);  // NOLINT(bugprone-use-after-move): emptied, as promised
    ProcessFd third;
    third = std::move(second);
    EXPECT_EQ(third.get(), raw);
    EXPECT_TRUE(is_open(raw));
  }
  EXPECT_FALSE(is_open(raw));
}

TEST(ProcessFd, WhatIsReleasedStaysOpenHereAndInChildren) {
  ProcessFd file = opened();
  int raw = -1;
  {
    const ForkPause pause;
    raw = file.release(pause);
  }
  EXPECT_FALSE(file);
  EXPECT_TRUE(is_open(raw));
  EXPECT_TRUE(holds_in_child([&] { return is_open(raw); }));
  ::close(raw);
}

TEST(ProcessFd, OpeningFailsWithErrno) {
  const ProcessFd file =
      ProcessFd::opened_by([] { return ::open("/nowhere/at all", O_RDONLY | O_CLOEXEC); });
  EXPECT_EQ(errno, ENOENT);
  EXPECT_FALSE(file);
}

TEST(ProcessFd, AForkedChildHasNone) {
  const auto before = descriptors_of(::getpid());
  std::vector<ProcessFd> files;  // which moves them as it grows
  for (int i = 0; i < 5; ++i) files.push_back(opened());
  std::swap(files[1], files[3]);
  files.erase(files.begin() + 2);
  EXPECT_TRUE(holds_in_child([&] {
    for (const ProcessFd& file : files)
      if (file) return false;
    return true;
  }));
  const PausedChild child;
  EXPECT_EQ(descriptors_of(child.pid()), before);
  for (const ProcessFd& file : files) EXPECT_TRUE(is_open(file.get()));
}

// The child's number may belong to another file by then.
TEST(ProcessFd, AChildClosesNothingTwice) {
  std::optional<ProcessFd> file = opened();
  const int raw = file->get();
  EXPECT_TRUE(holds_in_child([&] {
    const int other = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    file.reset();
    return other == raw && is_open(other);
  }));
}

// A child makes objects and children of its own.
TEST(ProcessFd, AChildStartsAnew) {
  const ProcessFd file = opened();
  EXPECT_TRUE(holds_in_child([&] {
    const ProcessFd own = opened();
    return own && holds_in_child([&] { return !own; });
  }));
}

// Neither those that are being opened at the time of the fork nor those that are being closed.
TEST(ProcessFd, NoChildKeepsWhatAnotherThreadOpensAndCloses) {
  std::atomic<bool> is_over = false;
  std::thread opener([&] {
    while (!is_over) {
      ProcessFd first = ProcessFd::opened_by([] { return ::eventfd(0, EFD_CLOEXEC); });
      const ProcessFd second(std::move(first));
    }
  });
  std::vector<PausedChild> children;
  for (int i = 0; i < 400; ++i) children.emplace_back();
  is_over = true;
  opener.join();
  std::size_t kept = 0;
  for (const PausedChild& child : children)
    for (const auto& [number, target] : descriptors_of(child.pid()))
      kept += target.find("eventfd") != std::string::npos;
  EXPECT_EQ(kept, 0u);
}

TEST(ProcessFd, MappingsAreNotInChildren) {
  constexpr std::size_t kBytes = 1 << 16;
  const ProcessFd file = make_memory_file("process fd test");
  ASSERT_EQ(::ftruncate(file.get(), kBytes), 0);
  void* const memory =
      map_in_this_process(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_POPULATE, file.get());
  ASSERT_NE(memory, MAP_FAILED);
  EXPECT_NE(maps_of(::getpid()).find("process fd test"), std::string::npos);
  const PausedChild child;
  EXPECT_EQ(maps_of(child.pid()).find("process fd test"), std::string::npos);
  ::munmap(memory, kBytes);
  EXPECT_EQ(map_in_this_process(nullptr, kBytes, PROT_READ, 0, -1), MAP_FAILED);
  EXPECT_EQ(errno, EBADF);
}

}  // namespace
}  // namespace sluice::test
