// Checks of an output before it is written. And: all pieces of a long file except the last ones are
// on the drive before the end asks for it, since other ranks wait for the fsync there.
#include "tools/cli/output_file.h"

#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/unique_fd.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"

namespace {

int write_back_error = 0;  // what the drive says of the next piece

}  // namespace

// Stands before that of libc.
extern "C" int sync_file_range(int descriptor, off64_t offset, off64_t count, unsigned flags) {
  if (write_back_error == 0)
    return static_cast<int>(::syscall(SYS_sync_file_range, descriptor, offset, count, flags));
  errno = std::exchange(write_back_error, 0);
  return -1;
}

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

// The kernel may say only once that it could not write a page, and then fsync succeeds.
TEST(OutputFile, NamesAFileWhosePiecesTheDriveRefuses) {
  const test::TempDirectory folder;
  const std::string path = folder.path() + "/model";
  const struct {
    int error;
    ErrorCode code;
    const char* remedy;
  } kCases[] = {{EIO, ErrorCode::kIo, "check the drive or the server"},
                {EDQUOT, ErrorCode::kNoSpace, "raise the quota"},
                {ENOSPC, ErrorCode::kNoSpace, "free space there"}};
  const std::string piece(40 * kMebibyte, 'x');
  for (const auto& [error, code, remedy] : kCases) {
    OutputFile output("--save", path);
    output.write("header");
    write_back_error = error;
    const std::string message = test::expect_error(code, [&] { output.write(piece); });
    EXPECT_NE(message.find("--save \"" + path + "\""), std::string::npos) << message;
    EXPECT_NE(message.find(remedy), std::string::npos) << message;
    struct stat status {};
    ASSERT_EQ(::fstat(output.descriptor(), &status), 0);
    EXPECT_EQ(status.st_size, 6) << "the file is as it was before the call";
    output.write(" and more");
    output.commit();
    std::ifstream file(path, std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(file), {}};
    EXPECT_EQ(content, "header and more");
  }
  for (const int refusal : {ENOSYS, EINVAL, ESPIPE}) {
    OutputFile output("--save", path);
    write_back_error = refusal;
    output.write(piece);
    output.commit();
  }
}

TEST(OutputFile, OneProcessWritesAFileThatGrows) {
  const test::TempDirectory folder;
  const std::string path = folder.path() + "/run.csv";
  OutputFile output("--csv", path);
  output.write("header\n");
  EXPECT_NO_THROW(OutputFile("--csv", path).check()) << "it has no name yet";
  output.accept();
  const std::string refusal =
      test::expect_error(ErrorCode::kInput, [&] { OutputFile("--csv", path).check(); });
  EXPECT_NE(refusal.find("another process still writes it"), std::string::npos) << refusal;
  ASSERT_EQ(::link(path.c_str(), (path + ".old").c_str()), 0);
  ASSERT_EQ(::unlink(path.c_str()), 0);
  EXPECT_NO_THROW(output.write("1\n")) << "it is there under another name";
  ASSERT_EQ(::unlink((path + ".old").c_str()), 0);
  const std::string loss = test::expect_error(ErrorCode::kIo, [&] { output.write("2\n"); });
  EXPECT_NE(loss.find(path + "\" has been removed or replaced"), std::string::npos) << loss;
  EXPECT_EQ(test::expect_error(ErrorCode::kIo, [&] { output.commit(); }), loss);
}

TEST(OutputFile, RefusesADescriptorThatIsOpenForReading) {
  const test::TempDirectory folder;
  const std::string path = folder.path() + "/input";
  const UniqueFd writer(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  const UniqueFd reader(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const auto output_to = [](const UniqueFd& file) {
    return OutputFile("--json", fmt::format("/dev/fd/{}", file.get()));
  };
  const std::string refusal =
      test::expect_error(ErrorCode::kInput, [&] { output_to(reader).check(); });
  EXPECT_NE(refusal.find("open for reading alone"), std::string::npos) << refusal;
  EXPECT_NO_THROW(output_to(writer).check());
}

// As another user for a while; the process is the test's alone.
class OtherUser {
 public:
  OtherUser() { EXPECT_EQ(::seteuid(65'534), 0); }
  ~OtherUser() { EXPECT_EQ(::seteuid(0), 0); }
};

// The rename would be refused hours later.
TEST(OutputFile, RefusesAnotherUsersFileInAStickyFolder) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can act as other users";
  const test::TempDirectory folder;
  const std::string shared = folder.path() + "/shared";
  ASSERT_EQ(::chmod(folder.path().c_str(), 0755), 0);
  ASSERT_EQ(::mkdir(shared.c_str(), 0700), 0);
  const std::string path = shared + "/run.json";
  const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::fchmod(file.get(), 0666), 0);
  ASSERT_EQ(::chmod(shared.c_str(), 01777), 0);
  EXPECT_NO_THROW(OutputFile("--json", path).check()) << "root may";
  const OtherUser other;
  const std::string refusal =
      test::expect_error(ErrorCode::kInput, [&] { OutputFile("--json", path).check(); });
  EXPECT_NE(refusal.find("its folder is sticky"), std::string::npos) << refusal;
  EXPECT_NO_THROW(OutputFile("--json", shared + "/mine.json").check());
}

}  // namespace
}  // namespace sluice
