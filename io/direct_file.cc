#include "io/direct_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <limits>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "base/file_flush.h"
#include "base/unique_fd.h"

namespace sluice {
namespace {

constexpr std::uint64_t kAlignmentBytesMin = 512;
constexpr std::uint64_t kFileBytesMax =
    std::numeric_limits<std::int64_t>::max() / kPageBytes * kPageBytes;

// `error` came from opening the directory or from creating a file in it.
[[noreturn]] void throw_unusable(const std::string& directory, int error) {
  std::string text;
  switch (error) {
    case ENOENT: text = "does not exist; create it"; break;
    case ENOTDIR: text = "is not a directory; remove what is there"; break;
    case EACCES:
    case EPERM: text = "is not writable; change its owner or its mode"; break;
    case EROFS: text = "is on a read-only file system; mount it writable"; break;
    case ELOOP:
    case ENAMETOOLONG: text = errno_text(error) + "; correct the path"; break;
    case EMFILE:
    case ENFILE:
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("cannot create a scratch file in \"{}\": {}; raise the limit of open "
                              "files ({})",
                              directory, errno_text(error),
                              error == EMFILE ? "ulimit -n" : "sysctl fs.file-max"));
    case ENOSPC:
    case EDQUOT:
      throw Error(ErrorCode::kNoSpace,
                  fmt::format("scratch directory \"{}\" has no room for another file: {}; free "
                              "space or inodes, or name another one in storage.paths",
                              directory, errno_text(error)));
    default:
      throw Error(ErrorCode::kIo,
                  fmt::format("cannot create a scratch file in \"{}\": {} (errno {}); check the "
                              "drive, or name another directory in storage.paths",
                              directory, errno_text(error), error));
  }
  throw Error(ErrorCode::kInput,
              fmt::format("scratch directory \"{}\" {}, or name another one in storage.paths",
                          directory, text));
}

// For file systems without O_TMPFILE. A crash between the two calls leaves an empty file behind.
ProcessFd open_and_unlink(const std::string& directory) {
  std::string path = directory + "/.sluice-scratch-XXXXXX";
  ProcessFd descriptor = ProcessFd::opened_by([&] { return ::mkostemp(path.data(), O_CLOEXEC); });
  if (!descriptor && errno == ENOENT)  // the directory exists: it has been opened
    throw Error(
        ErrorCode::kInput,
        fmt::format("scratch directory \"{}\" is on a file system that accepts no files; name "
                    "one on ext4, XFS or Btrfs in storage.paths",
                    directory));
  if (!descriptor) throw_unusable(directory, errno);
  if (::unlink(path.c_str()) != 0) {
    throw Error(ErrorCode::kIo, fmt::format("cannot unlink the scratch file {}: {}; remove it",
                                            path, errno_text(errno)));
  }
  return descriptor;
}

// Opens without O_DIRECT, because a file system that refuses that flag does so only after it has
// created the file. `flags`: O_EXCL where the file must never get a name.
ProcessFd open_unnamed(const std::string& directory, int flags) {
  const UniqueFd parent(::open(directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!parent) throw_unusable(directory, errno);
  ProcessFd descriptor = ProcessFd::opened_by([&] {
    return ::openat(parent.get(), ".", O_TMPFILE | flags | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR);
  });
  if (descriptor) return descriptor;
  // Kernels before 3.11, which do not know the flag, answer EISDIR.
  const bool is_unknown = errno == EOPNOTSUPP || errno == EISDIR;
  if (is_unknown && flags == O_EXCL) return open_and_unlink(directory);
  if (is_unknown)
    throw Error(ErrorCode::kUnsupported,
                fmt::format("\"{}\" is on a file system without unnamed files (O_TMPFILE), which a "
                            "durable store needs; name a path on ext4, XFS or Btrfs",
                            directory));
  throw_unusable(directory, errno);
}

std::uint64_t free_bytes(const ProcessFd& descriptor, const std::string& directory) {
  struct statvfs file_system {};
  if (::fstatvfs(descriptor.get(), &file_system) != 0) throw_unusable(directory, errno);
  return std::uint64_t{file_system.f_bavail} * file_system.f_frsize;
}

[[noreturn]] void throw_no_space(const std::string& directory, std::uint64_t needed_bytes,
                                 std::uint64_t available_bytes, const std::string& why,
                                 const char* remedy = "free space there") {
  throw Error(ErrorCode::kNoSpace,
              fmt::format("scratch directory \"{}\" needs {} ({} bytes) and has {} ({} bytes) "
                          "free: {}; {}, or name more directories in storage.paths",
                          directory, format_bytes(needed_bytes), needed_bytes,
                          format_bytes(available_bytes), available_bytes, why, remedy));
}

// Btrfs writes in new places otherwise: a later write needs space again, and one to a file with
// checksums goes through the page cache in spite of O_DIRECT. The call comes before the first byte.
// A system without such a flag copies nothing on write either.
void forbid_copies(const ProcessFd& descriptor) {
  unsigned flags = 0;
  if (::ioctl(descriptor.get(), FS_IOC_GETFLAGS, &flags) != 0) return;
  flags |= FS_NOCOW_FL;
  (void)::ioctl(descriptor.get(), FS_IOC_SETFLAGS, &flags);
}

// Gives the file its full size, with blocks allocated for every byte from `begin_bytes` on, which
// is a whole number of pages. Returns that size.
std::uint64_t allocate(const ProcessFd& descriptor, const std::string& directory,
                       std::uint64_t size_bytes, std::uint64_t begin_bytes = 0) {
  const std::uint64_t available_bytes = free_bytes(descriptor, directory);
  const std::uint64_t new_bytes = size_bytes - std::min(size_bytes, begin_bytes);
  if (new_bytes > available_bytes || size_bytes > kFileBytesMax)
    throw_no_space(directory, new_bytes, available_bytes, "too little");
  const std::uint64_t rounded_bytes = align_up(new_bytes, kPageBytes);
  if (rounded_bytes == 0) return begin_bytes;  // fallocate refuses 0 bytes
  int result = 0;
  do {
    result = ::fallocate(descriptor.get(), 0, static_cast<off_t>(begin_bytes),
                         static_cast<off_t>(rounded_bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return begin_bytes + rounded_bytes;
  const int error = errno;
  switch (error) {
    // ENOSPC although the check passed: other files grew meanwhile, or metadata needs the rest.
    // EFBIG: beyond the file system's largest file, or ulimit -f.
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      throw_no_space(
          directory, rounded_bytes, free_bytes(descriptor, directory), errno_text(error),
          error == EFBIG ? "raise the limit of file size (ulimit -f)" : "free space there");
    case EOPNOTSUPP:
    case ENOSYS:
      throw Error(ErrorCode::kInput,
                  fmt::format("scratch directory \"{}\" is on a file system that cannot "
                              "preallocate files; name one on ext4, XFS or Btrfs in storage.paths",
                              directory));
    default:
      throw Error(ErrorCode::kIo,
                  fmt::format("cannot allocate {} for a scratch file in \"{}\": {} (errno {}); "
                              "check the drive",
                              format_bytes(rounded_bytes), directory, errno_text(error), error));
  }
}

// Switches the page cache off. Returns the alignment that the file then asks for, or 0 where the
// cache stays on.
std::uint64_t make_direct(const ProcessFd& descriptor) {
  const int flags = ::fcntl(descriptor.get(), F_GETFL, 0);
  if (flags < 0 || ::fcntl(descriptor.get(), F_SETFL, flags | O_DIRECT) != 0) return 0;
#ifdef STATX_DIOALIGN
  struct statx answer {};
  if (::statx(descriptor.get(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &answer) == 0 &&
      (answer.stx_mask & STATX_DIOALIGN) != 0) {
    const std::uint64_t alignment_bytes =
        std::max(answer.stx_dio_mem_align, answer.stx_dio_offset_align);
    if (answer.stx_dio_offset_align != 0) return std::max(alignment_bytes, kAlignmentBytesMin);
    // Zero means that this file cannot do without the cache (encrypted files, for example).
    (void)::fcntl(descriptor.get(), F_SETFL, flags);
    return 0;
  }
#endif
  return kPageBytes;  // a kernel before 6.1 does not tell; no common drive asks for more
}

}  // namespace

std::uint64_t free_bytes(const std::string& directory) {
  struct statvfs file_system {};
  if (::statvfs(directory.c_str(), &file_system) != 0) throw_unusable(directory, errno);
  return std::uint64_t{file_system.f_bavail} * file_system.f_frsize;
}

DirectFile DirectFile::create_scratch(const std::string& directory, std::uint64_t size_bytes) {
  DirectFile file;
  file.name_ = directory + "/(scratch)";
  file.descriptor_ = open_unnamed(directory, O_EXCL);
  forbid_copies(file.descriptor_);
  file.size_bytes_ = allocate(file.descriptor_, directory, size_bytes);
  file.go_direct();
  return file;
}

DirectFile DirectFile::create_unnamed(const std::string& directory, std::uint64_t size_bytes) {
  DirectFile file;
  file.name_ = directory + "/(unnamed)";
  file.descriptor_ = open_unnamed(directory, 0);
  forbid_copies(file.descriptor_);
  file.size_bytes_ = allocate(file.descriptor_, directory, size_bytes);
  file.go_direct();
  return file;
}

void DirectFile::link_as(const std::string& path) {
  const std::string unnamed = fmt::format("/proc/self/fd/{}", descriptor_.get());
  if (::linkat(AT_FDCWD, unnamed.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    const int error = errno;
    throw Error(
        file_error_code(error, error == EEXIST ? ErrorCode::kInput : ErrorCode::kIo),
        fmt::format("cannot give a new file the name {}: {}; {}", path, errno_text(error),
                    error == EEXIST ? "move that file away, and try again" : file_remedy(error)));
  }
  name_ = path;
}

void DirectFile::extend(std::uint64_t size_bytes) {
  if (size_bytes <= size_bytes_) return;
  const std::uint64_t before_bytes = size_bytes_;
  try {
    size_bytes_ = allocate(descriptor_, std::filesystem::path(name_).parent_path().string(),
                           size_bytes, before_bytes);
  } catch (const Error&) {
    cut(before_bytes);  // a file system may have allocated some of it
    throw;
  }
}

void DirectFile::cut(std::uint64_t size_bytes) noexcept {
  if (::ftruncate(descriptor_.get(), static_cast<off_t>(size_bytes)) == 0) size_bytes_ = size_bytes;
}

DirectFile DirectFile::open_existing(const std::string& path, FileAccess access) {
  DirectFile file;
  file.name_ = path;
  const int flags = access == FileAccess::kRead ? O_RDONLY | O_NONBLOCK : O_RDWR;
  file.descriptor_ =
      ProcessFd::opened_by([&] { return ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW); });
  struct stat status {};
  if (!file.descriptor_ || ::fstat(file.descriptor_.get(), &status) != 0) {
    const int error = errno;
    throw Error(file_error_code(error, ErrorCode::kInput),
                fmt::format("cannot open {}: {}; {}", path, errno_text(error), file_remedy(error)));
  }
  if (!S_ISREG(status.st_mode))
    throw Error(ErrorCode::kInput,
                fmt::format("{} is not a regular file; bring back the one that was there", path));
  file.size_bytes_ = static_cast<std::uint64_t>(status.st_size);
  file.go_direct();
  return file;
}

DirectFile DirectFile::shared_as(const std::string& name) const {
  DirectFile file;
  file.name_ = name;
  file.descriptor_ =
      ProcessFd::opened_by([&] { return ::fcntl(descriptor_.get(), F_DUPFD_CLOEXEC, 0); });
  if (!file.descriptor_) {
    const int error = errno;
    throw Error(file_error_code(error, ErrorCode::kIo),
                fmt::format("cannot open {} once more: {}; {}", name, errno_text(error),
                            file_remedy(error)));
  }
  file.size_bytes_ = size_bytes_;
  file.alignment_bytes_ = alignment_bytes_;
  file.is_direct_ = is_direct_;
  return file;
}

void DirectFile::go_direct() {
  const std::uint64_t alignment_bytes = make_direct(descriptor_);
  is_direct_ = alignment_bytes != 0;
  if (is_direct_) alignment_bytes_ = alignment_bytes;
}

}  // namespace sluice
