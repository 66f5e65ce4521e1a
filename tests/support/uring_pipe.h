// A fixture with an io_uring queue and a pipe. A read from the pipe stays in the kernel until the
// test writes to the pipe. If the test writes fewer bytes than the read asks for, the read is
// short.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <memory>

#include <gtest/gtest.h>

#include <sluice/error.h>
#include "base/unique_fd.h"
#include "io/io_queue.h"

namespace sluice::test {

// The test is skipped if the kernel has no io_uring.
class UringPipe : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    source_ = UniqueFd(ends[0]);
    target_ = UniqueFd(ends[1]);
    try {
      queue_ = make_uring_queue({.depth = 2});
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      GTEST_SKIP() << error.what();
    }
  }

  UniqueFd source_;
  UniqueFd target_;
  std::unique_ptr<IoQueue> queue_;
};

}  // namespace sluice::test
