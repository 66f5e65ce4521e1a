#include "io/direct_file.h"

#include <fcntl.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <thread>

#include <gtest/gtest.h>

#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "tests/support/expect_error.h"
#include "tests/support/refused_syscall.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

constexpr const char* kNoFilters = "seccomp filters are not allowed here";

struct stat status_of(const DirectFile& file) {
  struct stat status {};
  EXPECT_EQ(::fstat(file.descriptor(), &status), 0);
  return status;
}

bool opened_direct(const DirectFile& file) {
  return (::fcntl(file.descriptor(), F_GETFL, 0) & O_DIRECT) != 0;
}

// Writes and reads one aligned piece at the end of the file.
void expect_usable(const DirectFile& file) {
  const std::uint64_t length = file.alignment_bytes();
  const auto offset = static_cast<off_t>(file.size_bytes() - length);
  AlignedBuffer written(length, "test");
  AlignedBuffer read(length, "test");
  std::memset(written.data(), 0x5a, length);
  EXPECT_EQ(::pwrite(file.descriptor(), written.data(), length, offset),
            static_cast<ssize_t>(length));
  EXPECT_EQ(::pread(file.descriptor(), read.data(), length, offset), static_cast<ssize_t>(length));
  EXPECT_EQ(std::memcmp(written.data(), read.data(), length), 0);
}

void expect_contains(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

class DirectFileTest : public ::testing::Test {
 protected:
  std::string create_error(ErrorCode code, const std::string& path, std::uint64_t size_bytes = 1) {
    return expect_error(code, [&] { (void)DirectFile::create_scratch(path, size_bytes); });
  }
  bool directory_is_empty() const { return std::filesystem::is_empty(directory_.path()); }

  TempDirectory directory_;
};

// A small file system of its own, as `mount` options say; only root may make one.
class Mount {
 public:
  Mount(const std::string& path, const std::string& options, unsigned long flags = 0)
      : path_(path),
        mounted_(::mount("tmpfs", path.c_str(), "tmpfs", flags, options.c_str()) == 0) {}
  Mount(const Mount&) = delete;
  Mount& operator=(const Mount&) = delete;
  ~Mount() {
    if (mounted_) ::umount2(path_.c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  std::uint64_t free_blocks() const {
    struct statvfs file_system {};
    EXPECT_EQ(::statvfs(path_.c_str(), &file_system), 0);
    return file_system.f_bfree;
  }

 private:
  std::string path_;
  bool mounted_;
};

TEST_F(DirectFileTest, IsPreallocatedPrivateAndWithoutAName) {
  const DirectFile file = DirectFile::create_scratch(directory_.path(), 1_MiB + 1);
  EXPECT_EQ(file.size_bytes(), 1_MiB + 4096);
  EXPECT_EQ(file.name(), directory_.path() + "/(scratch)");
  EXPECT_TRUE(directory_is_empty());
  const struct stat status = status_of(file);
  EXPECT_EQ(status.st_mode & 07777u, 0600u);
  EXPECT_EQ(status.st_nlink, 0u);
  EXPECT_EQ(static_cast<std::uint64_t>(status.st_size), file.size_bytes());
  EXPECT_GE(static_cast<std::uint64_t>(status.st_blocks) * 512, file.size_bytes());
  EXPECT_NE(::fcntl(file.descriptor(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(opened_direct(file), file.is_direct());
  EXPECT_GE(file.alignment_bytes(), 512u);
  EXPECT_EQ(file.alignment_bytes() & (file.alignment_bytes() - 1), 0u);
  expect_usable(file);
}

TEST_F(DirectFileTest, CannotBeGivenAName) {
  const DirectFile file = DirectFile::create_scratch(directory_.path(), 4096);
  const std::string self = "/proc/self/fd/" + std::to_string(file.descriptor());
  EXPECT_NE(::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, directory_.file("name").c_str(),
                     AT_SYMLINK_FOLLOW),
            0);
  EXPECT_TRUE(directory_is_empty());
}

// The alignment it states is the one that the kernel enforces (tmpfs enforces none).
TEST_F(DirectFileTest, HalfTheStatedAlignmentIsRefused) {
  const DirectFile file = DirectFile::create_scratch(directory_.path(), 64_KiB);
  AlignedBuffer buffer(64_KiB, "test");
  const std::uint64_t half = file.alignment_bytes() / 2;
  const ssize_t result = ::pwrite(file.descriptor(), buffer.data(), half, static_cast<off_t>(half));
  if (result >= 0) GTEST_SKIP() << "this file system takes unaligned direct transfers";
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(DirectFileTest, MayBeEmpty) {
  const DirectFile file = DirectFile::create_scratch(directory_.path(), 0);
  EXPECT_EQ(file.size_bytes(), 0u);
  EXPECT_GE(file.descriptor(), 0);
}

TEST_F(DirectFileTest, MovesWithItsDescriptor) {
  DirectFile first = DirectFile::create_scratch(directory_.path(), 4096);
  const int descriptor = first.descriptor();
  const DirectFile second = std::move(first);
  EXPECT_EQ(second.descriptor(), descriptor);
  expect_usable(second);
}

TEST_F(DirectFileTest, MissingDirectoryIsAnInputError) {
  const std::string path = directory_.file("missing");
  const std::string message = create_error(ErrorCode::kInput, path);
  expect_contains(message, path);
  expect_contains(message, "does not exist");
  expect_contains(message, "storage.paths");
  create_error(ErrorCode::kInput, "");
}

TEST_F(DirectFileTest, FileInPlaceOfADirectoryIsAnInputError) {
  const std::string path = directory_.file("file");
  std::ofstream(path) << "text";
  expect_contains(create_error(ErrorCode::kInput, path), "is not a directory");
  expect_contains(create_error(ErrorCode::kInput, path + "/below"), "is not a directory");
}

TEST_F(DirectFileTest, PathThatCannotBeIsAnInputError) {
  expect_contains(create_error(ErrorCode::kInput, directory_.file(std::string(300, 'x'))),
                  errno_text(ENAMETOOLONG));
  const std::string loop = directory_.file("loop");
  std::filesystem::create_symlink(loop, loop);
  // With O_PATH and O_DIRECTORY a loop is ELOOP like anywhere else.
  create_error(ErrorCode::kInput, loop);
}

TEST_F(DirectFileTest, DirectoryWithoutWritePermissionIsAnInputError) {
  const std::string path = directory_.file("sealed");
  ASSERT_EQ(::mkdir(path.c_str(), 0555), 0);
  ASSERT_EQ(::chmod(directory_.path().c_str(), 0755), 0);
  // Root may write anywhere: this thread becomes another user as far as files are concerned.
  std::thread([&] {
    if (::geteuid() == 0) ::setfsuid(65534);
    expect_contains(create_error(ErrorCode::kInput, path), "is not writable");
  }).join();
}

TEST_F(DirectFileTest, ReadOnlyFileSystemIsAnInputError) {
  const Mount mount(directory_.path(), "size=1m", MS_RDONLY);
  if (!mount.mounted()) GTEST_SKIP() << "mounting tmpfs: " << errno_text(errno);
  expect_contains(create_error(ErrorCode::kInput, directory_.path()), "read-only file system");
}

TEST_F(DirectFileTest, MoreThanTheFreeSpaceIsRefusedWithBothNumbers) {
  constexpr std::uint64_t kNeededBytes = std::uint64_t{1} << 61;
  const std::string message = create_error(ErrorCode::kNoSpace, directory_.path(), kNeededBytes);
  expect_contains(message, "needs " + format_bytes(kNeededBytes));
  expect_contains(message, std::to_string(kNeededBytes) + " bytes");
  expect_contains(message, "and has");
  expect_contains(message, "storage.paths");
  // Rounding up to pages must not wrap around.
  create_error(ErrorCode::kNoSpace, directory_.path(), std::numeric_limits<std::uint64_t>::max());
  EXPECT_TRUE(directory_is_empty());
}

TEST_F(DirectFileTest, FullFileSystemIsRefusedAndSpaceComesBack) {
  const Mount mount(directory_.path(), "size=8m");
  if (!mount.mounted()) GTEST_SKIP() << "mounting tmpfs: " << errno_text(errno);
  const std::uint64_t free_blocks = mount.free_blocks();
  {
    std::optional<DirectFile> file = DirectFile::create_scratch(directory_.path(), 7_MiB);
    EXPECT_EQ(mount.free_blocks(), free_blocks - 7_MiB / 4096);
    expect_usable(*file);
    const std::string message = create_error(ErrorCode::kNoSpace, directory_.path(), 2_MiB);
    expect_contains(message, "needs 2.00 MiB (2097152 bytes) and has 1.00 MiB (1048576 bytes)");
    EXPECT_EQ(mount.free_blocks(), free_blocks - 7_MiB / 4096);
    file.reset();
    EXPECT_EQ(mount.free_blocks(), free_blocks);
  }
  (void)DirectFile::create_scratch(directory_.path(), 7_MiB);
}

TEST_F(DirectFileTest, FileSystemWithoutInodesIsRefused) {
  const Mount mount(directory_.path(), "size=1m,nr_inodes=1");
  if (!mount.mounted()) GTEST_SKIP() << "mounting tmpfs: " << errno_text(errno);
  expect_contains(create_error(ErrorCode::kNoSpace, directory_.path()), "inodes");
}

// Between the check of the free space and the allocation, other files may grow.
TEST_F(DirectFileTest, SpaceLostAfterTheCheckIsRefused) {
  for (const int error : {ENOSPC, EDQUOT}) {
    const bool filtered = run_with_refused({.number = SYS_fallocate, .error = error}, [&] {
      const std::string message = create_error(ErrorCode::kNoSpace, directory_.path(), 5000);
      expect_contains(message, "(8192 bytes)");
      expect_contains(message, errno_text(error));
    });
    if (!filtered) GTEST_SKIP() << kNoFilters;
  }
}

TEST_F(DirectFileTest, LimitOfFileSizeIsRefused) {
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit limit{.rlim_cur = 64_KiB, .rlim_max = old_limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string message = create_error(ErrorCode::kNoSpace, directory_.path(), 1_MiB);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::signal(SIGXFSZ, old_handler);
  expect_contains(message, errno_text(EFBIG));
  expect_contains(message, "raise the limit of file size (ulimit -f)");
}

TEST_F(DirectFileTest, TooManyOpenFilesAreNamedWithTheirLimit) {
  for (const auto& [error, limit] : {std::pair{EMFILE, "ulimit -n"}, {ENFILE, "fs.file-max"}}) {
    const bool filtered = run_with_refused({.number = SYS_openat, .error = error}, [&] {
      const std::string message = create_error(ErrorCode::kUnsupported, directory_.path());
      expect_contains(message, directory_.path());
      expect_contains(message, errno_text(error));
      expect_contains(message, limit);
    });
    if (!filtered) GTEST_SKIP() << kNoFilters;
  }
}

TEST_F(DirectFileTest, FileSystemThatCannotPreallocateIsAnInputError) {
  const bool filtered = run_with_refused({.number = SYS_fallocate, .error = EOPNOTSUPP}, [&] {
    expect_contains(create_error(ErrorCode::kInput, directory_.path()), "cannot preallocate");
  });
  if (!filtered) GTEST_SKIP() << kNoFilters;
}

TEST_F(DirectFileTest, FailingDriveIsAnIoError) {
  const bool allocation_filtered = run_with_refused({.number = SYS_fallocate, .error = EIO}, [&] {
    expect_contains(create_error(ErrorCode::kIo, directory_.path()), errno_text(EIO));
  });
  const bool open_filtered = run_with_refused(
      {.number = SYS_openat, .error = EIO, .argument = 2, .bits = O_TMPFILE},
      [&] { expect_contains(create_error(ErrorCode::kIo, directory_.path()), errno_text(EIO)); });
  if (!allocation_filtered || !open_filtered) GTEST_SKIP() << kNoFilters;
}

TEST_F(DirectFileTest, WithoutTmpfileTheNameIsRemovedAtOnce) {
  for (const int error : {EOPNOTSUPP, EISDIR}) {
    const bool filtered = run_with_refused(
        {.number = SYS_openat, .error = error, .argument = 2, .bits = O_TMPFILE}, [&] {
          const DirectFile file = DirectFile::create_scratch(directory_.path(), 64_KiB);
          EXPECT_TRUE(directory_is_empty());
          const struct stat status = status_of(file);
          EXPECT_EQ(status.st_mode & 07777u, 0600u);
          EXPECT_EQ(status.st_nlink, 0u);
          EXPECT_EQ(opened_direct(file), file.is_direct());
          expect_usable(file);
        });
    if (!filtered) GTEST_SKIP() << kNoFilters;
  }
}

TEST_F(DirectFileTest, WithoutDirectTheCacheIsUsed) {
  const bool filtered = run_with_refused(
      {.number = SYS_fcntl, .error = EINVAL, .argument = 2, .bits = O_DIRECT}, [&] {
        const DirectFile file = DirectFile::create_scratch(directory_.path(), 64_KiB);
        EXPECT_FALSE(file.is_direct());
        EXPECT_FALSE(opened_direct(file));
        EXPECT_EQ(file.alignment_bytes(), 512u);
        expect_usable(file);
      });
  if (!filtered) GTEST_SKIP() << kNoFilters;
}

TEST_F(DirectFileTest, KernelThatDoesNotTellTheAlignmentGetsAPage) {
  if (!DirectFile::create_scratch(directory_.path(), 4096).is_direct())
    GTEST_SKIP() << "this file system refuses O_DIRECT";
  const bool filtered = run_with_refused({.number = SYS_statx, .error = ENOSYS}, [&] {
    const DirectFile file = DirectFile::create_scratch(directory_.path(), 64_KiB);
    EXPECT_TRUE(file.is_direct());
    EXPECT_EQ(file.alignment_bytes(), 4096u);
    expect_usable(file);
  });
  if (!filtered) GTEST_SKIP() << kNoFilters;
}

}  // namespace
}  // namespace sluice::test
