#include "base/file_flush.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "base/unique_fd.h"

namespace sluice {
namespace {

// EROFS is no refusal: ext4 returns it for a file whose file system has failed since.
bool is_refusal_to_sync(int error) {
  return error == EINVAL || error == ENOTSUP;
}

int sync_error(int descriptor) {
  while (::fsync(descriptor) != 0) {
    if (errno != EINTR) return is_refusal_to_sync(errno) ? 0 : errno;
  }
  return 0;
}

}  // namespace

int flush_file(int descriptor) {
  const int error = sync_error(descriptor);
  return error != 0 ? error : closing_error(descriptor);
}

int closing_error(int descriptor) {
  const int duplicate = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (duplicate < 0) return errno == EMFILE || errno == ENFILE ? 0 : errno;
  // EINTR leaves it closed, and says nothing about the bytes.
  return ::close(duplicate) == 0 || errno == EINTR ? 0 : errno;
}

int flush_folder(const std::string& folder) {
  const UniqueFd opened(
      ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened) return sync_error(opened.get());
  return errno == EACCES ? 0 : errno;
}

ErrorCode file_error_code(int error, ErrorCode otherwise) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG: return ErrorCode::kNoSpace;
    case EMFILE:
    case ENFILE:
    case ENOMEM: return ErrorCode::kUnsupported;
    case EIO:
    case ESTALE:
    case EPIPE: return ErrorCode::kIo;
    default: return otherwise;
  }
}

const char* file_remedy(int error) {
  switch (error) {
    case ENOSPC: return "free space there, or name a file on another disk";
    case EDQUOT: return "raise the quota, or name a file on another disk";
    case EFBIG: return "raise the limit of a file's size (ulimit -f)";
    case EMFILE: return "raise the limit of open files (ulimit -n)";
    case ENFILE: return "close files of other processes";
    case ENOMEM: return "free memory";
    case EIO: return "check the drive or the server (dmesg)";
    case ESTALE: return "the server has lost the file; mount it again";
    case EROFS: return "the file system allows no writing; check dmesg, or name another place";
    case EPIPE: return "who reads it has gone";
    case ENAMETOOLONG: return "choose a shorter name";
    case EBUSY: return "name a file that is not mounted by itself";
    default: return "check the folder and its mode, or name another place";
  }
}

}  // namespace sluice
