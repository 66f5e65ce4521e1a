// Put before libc by LD_PRELOAD (tests/support/preloaded_faults.h): one call on the files of a
// folder fails, or moves half of what it should. Counts the calls by which a durable store or a
// checkpoint is made, written, read, named and removed. Thread rule: any thread.
#include <dirent.h>

#include "tests/support/preloaded_faults.h"

namespace {

using namespace sluice::test;

bool fails(const char* name, const char* path) {
  return fate_of(name, path) == Fate::kFail;
}
bool fails(const char* name, int descriptor) {
  return fails(name, OpenPath(descriptor).text);
}

// Half of it, in whole pages where it has more than one. Direct transfers move whole pages.
size_t half_of(int descriptor, size_t size) {
  constexpr size_t kPage = 4096;
  if (size > kPage) return (size / 2 + kPage - 1) / kPage * kPage;
  return (::fcntl(descriptor, F_GETFL) & O_DIRECT) != 0 ? size : (size + 1) / 2;
}

template <class Function, class Data>
ssize_t move(const char* name, const char* logged, int descriptor, Data* data, size_t size,
             off_t offset) {
  const Fate fate = fate_of(logged, OpenPath(descriptor).text);
  if (fate == Fate::kFail) return -1;
  return next<Function>(name)(descriptor, data,
                              fate == Fate::kPart ? half_of(descriptor, size) : size, offset);
}

using Read = ssize_t(int, void*, size_t, off_t);
using Write = ssize_t(int, const void*, size_t, off_t);

int open_file(const char* name, const char* path, int flags, mode_t mode) {
  if (fails("open", path)) return -1;
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
int openat(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  if (*path == '/' ? fails("open", path) : fails("open", folder)) return -1;
  return next<int(int, const char*, int, mode_t)>("openat")(folder, path, flags, mode);
}
DIR* opendir(const char* path) {
  if (fails("opendir", path)) return nullptr;
  return next<DIR*(const char*)>("opendir")(path);
}

ssize_t read(int descriptor, void* data, size_t size) {
  const Fate fate = fate_of("read", OpenPath(descriptor).text);
  if (fate == Fate::kFail) return -1;
  return next<ssize_t(int, void*, size_t)>("read")(
      descriptor, data, fate == Fate::kPart ? half_of(descriptor, size) : size);
}
ssize_t pread(int descriptor, void* data, size_t size, off_t offset) {
  return move<Read>("pread", "pread", descriptor, data, size, offset);
}
ssize_t pread64(int descriptor, void* data, size_t size, off64_t offset) {
  return move<Read>("pread64", "pread", descriptor, data, size, offset);
}
ssize_t pwrite(int descriptor, const void* data, size_t size, off_t offset) {
  return move<Write>("pwrite", "pwrite", descriptor, data, size, offset);
}
ssize_t pwrite64(int descriptor, const void* data, size_t size, off64_t offset) {
  return move<Write>("pwrite64", "pwrite", descriptor, data, size, offset);
}

int fsync(int descriptor) {
  return fails("fsync", descriptor) ? -1 : next<int(int)>("fsync")(descriptor);
}
int fdatasync(int descriptor) {
  return fails("fsync", descriptor) ? -1 : next<int(int)>("fdatasync")(descriptor);
}
int ftruncate(int descriptor, off_t length) {
  if (fails("ftruncate", descriptor)) return -1;
  return next<int(int, off_t)>("ftruncate")(descriptor, length);
}
int fallocate(int descriptor, int mode, off_t offset, off_t length) {
  if (fails("fallocate", descriptor)) return -1;
  return next<int(int, int, off_t, off_t)>("fallocate")(descriptor, mode, offset, length);
}
int posix_fallocate(int descriptor, off_t offset, off_t length) {
  if (fails("fallocate", descriptor)) return errno;
  return next<int(int, off_t, off_t)>("posix_fallocate")(descriptor, offset, length);
}

int mkdir(const char* path, mode_t mode) {
  return fails("mkdir", path) ? -1 : next<int(const char*, mode_t)>("mkdir")(path, mode);
}
char* mkdtemp(char* path) {
  return fails("mkdtemp", path) ? nullptr : next<char*(char*)>("mkdtemp")(path);
}
int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  if (fails("linkat", to)) return -1;
  return next<int(int, const char*, int, const char*, int)>("linkat")(from_folder, from, to_folder,
                                                                      to, flags);
}
int symlink(const char* target, const char* path) {
  if (fails("symlink", path)) return -1;
  return next<int(const char*, const char*)>("symlink")(target, path);
}
int rename(const char* from, const char* to) {
  if (fails("rename", from)) return -1;
  return next<int(const char*, const char*)>("rename")(from, to);
}
int unlink(const char* path) {
  return fails("unlink", path) ? -1 : next<int(const char*)>("unlink")(path);
}

}  // extern "C"
