// Errors that come late: this program's own fsync() and close() stand before those of libc, and
// fail on request.
#include "base/file_flush.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/unique_fd.h"

namespace {

int fsync_error = 0;
int fsync_failures = 0;
int close_error = 0;
int closed = -1;  // the last descriptor whose close() failed

}  // namespace

extern "C" int fsync(int descriptor) {
  if (fsync_failures > 0) {
    --fsync_failures;
    errno = fsync_error;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

extern "C" int close(int descriptor) {
  const int result = static_cast<int>(::syscall(SYS_close, descriptor));
  if (close_error == 0) return result;
  closed = descriptor;
  errno = close_error;
  return -1;
}

namespace sluice {
namespace {

class FileFlush : public testing::Test {
 protected:
  ~FileFlush() override {
    fsync_failures = 0;
    close_error = 0;
  }

  // An unnamed file.
  const UniqueFd file_{::open(testing::TempDir().c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)};
};

TEST_F(FileFlush, ReportsWhatTheDriveSays) {
  ASSERT_TRUE(file_);
  EXPECT_EQ(flush_file(file_.get()), 0);
  // EROFS is the answer for a file on an ext4 that has failed: not a refusal to sync.
  for (const int error : {EIO, EDQUOT, ENOSPC, EROFS}) {
    fsync_error = error;
    fsync_failures = 1;
    EXPECT_EQ(flush_file(file_.get()), error);
    fsync_failures = 1;
    EXPECT_EQ(flush_folder("/"), error);
  }
}

TEST_F(FileFlush, GoesOnAfterAnInterruptionAndWhereThereIsNoSync) {
  ASSERT_TRUE(file_);
  fsync_error = EINTR;
  fsync_failures = 3;
  EXPECT_EQ(flush_file(file_.get()), 0);
  EXPECT_EQ(fsync_failures, 0);
  for (const int error : {EINVAL, ENOTSUP}) {
    fsync_error = error;
    fsync_failures = 1;
    EXPECT_EQ(flush_file(file_.get()), 0);
  }
}

TEST_F(FileFlush, ReportsWhatAServerSaysAtTheClose) {
  ASSERT_TRUE(file_);
  for (const int error : {EIO, EDQUOT, ENOSPC, ESTALE}) {
    close_error = error;
    EXPECT_EQ(closing_error(file_.get()), error);
    EXPECT_EQ(flush_file(file_.get()), error);
    EXPECT_NE(closed, file_.get());
    EXPECT_NE(::fcntl(file_.get(), F_GETFD), -1) << "the file itself stays open";
  }
  close_error = EINTR;
  EXPECT_EQ(closing_error(file_.get()), 0);
}

// The bytes are on the drive by then.
TEST_F(FileFlush, DoesWithoutTheCloseWhereTheProcessMayOpenNoMoreFiles) {
  ASSERT_TRUE(file_);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 1;  // which the standard input has
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const int error = flush_file(file_.get());
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(error, 0);
}

TEST_F(FileFlush, NamesAFolderThatIsNotThere) {
  EXPECT_EQ(flush_folder("/no/such/folder"), ENOENT);
  EXPECT_EQ(flush_folder(""), 0) << "the current one";
}

TEST(FileErrors, HaveACodeAndARemedy) {
  EXPECT_EQ(file_error_code(EDQUOT, ErrorCode::kIo), ErrorCode::kNoSpace);
  EXPECT_EQ(file_error_code(EMFILE, ErrorCode::kIo), ErrorCode::kUnsupported);
  EXPECT_EQ(file_error_code(ESTALE, ErrorCode::kInput), ErrorCode::kIo);
  EXPECT_EQ(file_error_code(EACCES, ErrorCode::kInput), ErrorCode::kInput);
  EXPECT_NE(std::string(file_remedy(EDQUOT)).find("quota"), std::string::npos);
  EXPECT_NE(std::string(file_remedy(ESTALE)).find("mount"), std::string::npos);
  EXPECT_NE(std::string(file_remedy(EROFS)).find("dmesg"), std::string::npos);
}

}  // namespace
}  // namespace sluice
