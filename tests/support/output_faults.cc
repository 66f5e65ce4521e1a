// Put before libc by LD_PRELOAD (tests/support/preloaded_faults.h): one call by which a process
// opens, writes, syncs, closes or renames a file in a folder fails, is cut short, or brings a
// signal. A close that fails has closed the file, as on a network file system. A write that is cut
// short writes only its first byte. Thread rule: any thread.
#include "tests/support/preloaded_faults.h"

namespace {

using namespace sluice::test;

using WriteFunction = ssize_t(int, const void*, size_t);
using SyncFunction = int(int);
using RenameFunction = int(const char*, const char*);

int open_file(const char* name, const char* path, int flags, mode_t mode) {
  const bool is_output = (flags & O_ACCMODE) != O_RDONLY && is_inside(path);
  if (is_output && fate_of("open", path) == Fate::kFail) return -1;
  return next<OpenFunction>(name)(path, flags, mode);
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_file("open", path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_file("open64", path, flags, mode);
}

ssize_t write(int descriptor, const void* data, size_t size) {
  const OpenPath path(descriptor);
  if (is_inside(path.text) && size != 0) {
    const Fate fate = fate_of("write", path.text);
    if (fate == Fate::kFail) return -1;
    if (fate == Fate::kPart) size = 1;
  }
  return next<WriteFunction>("write")(descriptor, data, size);
}

int fsync(int descriptor) {
  const OpenPath path(descriptor);
  if (is_inside(path.text) && fate_of("fsync", path.text) == Fate::kFail) return -1;
  return next<SyncFunction>("fsync")(descriptor);
}

int close(int descriptor) {
  const OpenPath path(descriptor);
  const bool is_output =
      is_inside(path.text) && (::fcntl(descriptor, F_GETFL) & O_ACCMODE) != O_RDONLY;
  const Fate fate = is_output ? fate_of("close", path.text) : Fate::kPass;
  const int error = errno;
  const int result = next<SyncFunction>("close")(descriptor);
  if (fate != Fate::kFail) return result;
  errno = error;
  return -1;
}

int rename(const char* from, const char* to) {
  if (is_inside(from) && fate_of("rename", from) == Fate::kFail) return -1;
  return next<RenameFunction>("rename")(from, to);
}

}  // extern "C"
