// Several worlds of one process: the permission to read its memory is the process's, and the worlds
// share it.
#include <gtest/gtest.h>

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdarg>
#include <optional>
#include <utility>

#include "gpu/ranks/host_neighbors.h"
#include "tests/gpu/ranks/thread_port.h"

namespace {

std::atomic<int> permitted = 0;  // the process that may read this one's memory; 0 = none

}  // namespace

// Stands before that of libc, since few systems here have Yama, which the permission is for.
extern "C" int prctl(int option, ...) {
  va_list arguments;
  va_start(arguments, option);
  const auto process = va_arg(arguments, int);
  va_end(arguments);
  if (option != PR_SET_PTRACER) return static_cast<int>(::syscall(SYS_prctl, option, process));
  permitted = process;
  return 0;
}

namespace sluice {
namespace {

TEST(ReadPermit, LastsUntilTheLastOfTheProcess) {
  std::optional<ReadPermit> first(ReadPermit::for_siblings());
  EXPECT_EQ(permitted, ::getppid());
  std::optional<ReadPermit> second(ReadPermit::for_siblings());
  first.reset();
  EXPECT_EQ(permitted, ::getppid()) << "it was the other world's, too";
  ReadPermit moved(std::move(*second));
  second.reset();
  EXPECT_EQ(permitted, ::getppid());
  moved = ReadPermit();
  EXPECT_EQ(permitted, 0);
}

// A world that finds that it can read needs the permission to last, if there is one.
TEST(ReadPermit, AShareOfNothingIsNothing) {
  {
    const ReadPermit none = ReadPermit::share();
    EXPECT_EQ(permitted, 0) << "nobody has given it";
    std::optional<ReadPermit> first(ReadPermit::for_siblings());
    std::optional<ReadPermit> shared(ReadPermit::share());
    first.reset();
    EXPECT_EQ(permitted, ::getppid());
    shared.reset();
    EXPECT_EQ(permitted, 0);
  }
  EXPECT_EQ(permitted, 0);
}

// It can read because of the other world's permission, which then ends.
TEST(ReadPermit, AWorldKeepsAPermissionThatItMayNeed) {
  std::barrier<> both(2);
  std::optional<ReadPermit> other(ReadPermit::for_siblings());
  run_ports(2, {}, [&](ThreadPort& port) {
    const HostNeighbors neighbors(port);
    both.arrive_and_wait();
    if (port.rank() == 0) other.reset();
    both.arrive_and_wait();
    EXPECT_EQ(permitted, ::getppid());
    both.arrive_and_wait();
  });
  EXPECT_EQ(permitted, 0);
}

}  // namespace
}  // namespace sluice
