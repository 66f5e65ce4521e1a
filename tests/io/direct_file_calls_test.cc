// Answers of the kernel that no file system here gives: stand-ins before the C library's functions.
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <filesystem>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include <sluice/units.h>
#include "io/direct_file.h"
#include "tests/support/expect_error.h"
#include "tests/support/refused_syscall.h"
#include "tests/support/temp_directory.h"

namespace {

struct Answers {
  std::vector<int> fallocate_errors;  // of the next calls, 0: none
  std::uint64_t grown_bytes = 0;      // that a failed fallocate() leaves the file longer
  std::optional<std::pair<std::uint32_t, std::uint32_t>> alignments;  // of memory and of offsets
  bool has_flags = false;  // that FS_IOC_GETFLAGS and FS_IOC_SETFLAGS are known

  std::vector<std::pair<off_t, off_t>> allocations;  // begin and length
  unsigned flags = FS_NOATIME_FL;
};
thread_local Answers answers;

}  // namespace

extern "C" int fallocate(int descriptor, int mode, off_t begin, off_t length) {
  answers.allocations.emplace_back(begin, length);
  int error = 0;
  if (!answers.fallocate_errors.empty()) {
    error = answers.fallocate_errors.front();
    answers.fallocate_errors.erase(answers.fallocate_errors.begin());
  }
  if (error == 0)
    return static_cast<int>(::syscall(SYS_fallocate, descriptor, mode, begin, length));
  if (answers.grown_bytes != 0) {
    EXPECT_EQ(::ftruncate(descriptor, begin + static_cast<off_t>(answers.grown_bytes)), 0);
  }
  errno = error;
  return -1;
}

extern "C" int statx(int folder, const char* path, int flags, unsigned mask,
                     struct statx* answer) noexcept {
  const long result = ::syscall(SYS_statx, folder, path, flags, mask, answer);
#ifdef STATX_DIOALIGN
  if (answers.alignments && (mask & STATX_DIOALIGN) != 0) {
    answer->stx_mask |= STATX_DIOALIGN;
    answer->stx_dio_mem_align = answers.alignments->first;
    answer->stx_dio_offset_align = answers.alignments->second;
  }
#endif
  return static_cast<int>(result);
}

extern "C" int ioctl(int descriptor, unsigned long request, ...) noexcept {
  va_list arguments;
  va_start(arguments, request);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  if (answers.has_flags && request == FS_IOC_GETFLAGS) {
    *static_cast<unsigned*>(argument) = answers.flags;
    return 0;
  }
  if (answers.has_flags && request == FS_IOC_SETFLAGS) {
    answers.flags = *static_cast<const unsigned*>(argument);
    return 0;
  }
  return static_cast<int>(::syscall(SYS_ioctl, descriptor, request, argument));
}

namespace sluice::test {
namespace {

class DirectFileCalls : public ::testing::Test {
 protected:
  DirectFileCalls() { answers = {}; }
  ~DirectFileCalls() override { answers = {}; }

  DirectFile create(std::uint64_t size_bytes = 64_KiB) const {
    return DirectFile::create_scratch(directory_.path(), size_bytes);
  }
  // Skips where the file system refuses O_DIRECT, or the headers do not have what statx() tells.
  bool tells_alignments() const {
#ifdef STATX_DIOALIGN
    return create().is_direct();
#else
    return false;
#endif
  }

  TempDirectory directory_;
};

TEST_F(DirectFileCalls, AnInterruptedAllocationIsTriedAgain) {
  answers.fallocate_errors = {EINTR, EINTR};
  EXPECT_EQ(create().size_bytes(), 64_KiB);
  EXPECT_EQ(answers.allocations.size(), 3u);
}

TEST_F(DirectFileCalls, AnExtensionAllocatesOnlyWhatIsNew) {
  DirectFile file = create();
  answers.allocations.clear();
  file.extend(96_KiB);
  EXPECT_EQ(file.size_bytes(), 96_KiB);
  EXPECT_EQ(answers.allocations, (std::vector<std::pair<off_t, off_t>>{{64_KiB, 32_KiB}}));
}

TEST_F(DirectFileCalls, AnExtensionThatFailsHalfwayIsCutOff) {
  DirectFile file = create();
  answers.fallocate_errors = {ENOSPC};
  answers.grown_bytes = 16_KiB;
  expect_error(ErrorCode::kNoSpace, [&] { file.extend(96_KiB); });
  EXPECT_EQ(file.size_bytes(), 64_KiB);
  struct stat status {};
  ASSERT_EQ(::fstat(file.descriptor(), &status), 0);
  EXPECT_EQ(status.st_size, static_cast<off_t>(64_KiB));
}

TEST_F(DirectFileCalls, TheLargerAlignmentCounts) {
  if (!tells_alignments()) GTEST_SKIP() << "no statx() here that tells alignments";
  answers.alignments = {8192, 1024};
  const DirectFile file = create();
  EXPECT_EQ(file.alignment_bytes(), 8192u);
  const DirectFile shared = file.shared_as("shared");
  EXPECT_EQ(shared.alignment_bytes(), 8192u);
  EXPECT_TRUE(shared.is_direct());
  answers.alignments = {256, 256};
  EXPECT_EQ(create().alignment_bytes(), 512u);
}

// An encrypted file, for example.
TEST_F(DirectFileCalls, AFileThatCannotDoWithoutTheCacheKeepsIt) {
  if (!tells_alignments()) GTEST_SKIP() << "no statx() here that tells alignments";
  answers.alignments = {0, 0};
  const DirectFile file = create();
  EXPECT_FALSE(file.is_direct());
  EXPECT_EQ(::fcntl(file.descriptor(), F_GETFL, 0) & O_DIRECT, 0);
  EXPECT_EQ(file.alignment_bytes(), 512u);
}

TEST_F(DirectFileCalls, BtrfsWritesInPlace) {
  answers.has_flags = true;
  (void)create();
  EXPECT_EQ(answers.flags, unsigned{FS_NOATIME_FL | FS_NOCOW_FL});
  answers.flags = 0;
  (void)DirectFile::create_unnamed(directory_.path(), 4096);
  EXPECT_EQ(answers.flags, unsigned{FS_NOCOW_FL});
}

TEST_F(DirectFileCalls, LinksAndPipesAreNoFiles) {
  const std::string name = directory_.path() + "/file";
  DirectFile::create_unnamed(directory_.path(), 4096).link_as(name);
  std::filesystem::create_symlink(name, directory_.path() + "/link");
  ASSERT_EQ(::mkfifo((directory_.path() + "/pipe").c_str(), 0600), 0);
  for (const FileAccess access : {FileAccess::kRead, FileAccess::kReadAndWrite}) {
    EXPECT_EQ(DirectFile::open_existing(name, access).size_bytes(), 4096u);
    const std::string words = expect_error(ErrorCode::kInput, [&] {
      (void)DirectFile::open_existing(directory_.path() + "/link", access);
    });
    EXPECT_NE(words.find("cannot open"), std::string::npos) << words;
  }
  ::alarm(20);  // ends a call that waits for a writer
  const std::string words = expect_error(ErrorCode::kInput, [&] {
    (void)DirectFile::open_existing(directory_.path() + "/pipe", FileAccess::kRead);
  });
  ::alarm(0);
  EXPECT_NE(words.find("is not a regular file"), std::string::npos) << words;
}

TEST_F(DirectFileCalls, AFileThatKeepsItsNameIsNamed) {
#ifdef SYS_unlink
  constexpr long kUnlink = SYS_unlink;
#else
  constexpr long kUnlink = SYS_unlinkat;
#endif
  std::string words;
  bool is_filtered = false;
  const bool filtered = run_with_refused(
      {.number = SYS_openat, .error = EOPNOTSUPP, .argument = 2, .bits = O_TMPFILE}, [&] {
        is_filtered = refuse_for_this_thread({.number = kUnlink, .error = EIO});
        if (is_filtered) words = expect_error(ErrorCode::kIo, [&] { (void)create(); });
      });
  if (!filtered || !is_filtered) GTEST_SKIP() << "seccomp filters are not allowed here";
  EXPECT_NE(words.find("cannot unlink the scratch file " + directory_.path()), std::string::npos)
      << words;
}

}  // namespace
}  // namespace sluice::test
