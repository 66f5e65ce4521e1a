// Put before libc by LD_PRELOAD: one call on the files of a folder fails, or moves half of what it
// should. Counts the calls by which a durable store or a checkpoint is made, written, read, named
// and removed.
//
//   SLUICE_FAULT_FOLDER=DIR  absolute, without links
//   SLUICE_FAULT_AT=N        the call, counted from 1; 0 = none
//   SLUICE_FAULT_ERRNO=E     what it fails with; without it, a read or a write moves half
//   SLUICE_FAULT_MARK=FILE   is made when that call comes
//   SLUICE_FAULT_LOG=FILE    a line for each call: its name and the path
//
// Thread rule: any thread.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

const char* setting(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

bool is_inside(const char* path) {
  static const char* const folder = setting("SLUICE_FAULT_FOLDER");
  static const std::size_t length = std::strlen(folder);
  return length != 0 && std::strncmp(path, folder, length) == 0 &&
         (path[length] == '/' || path[length] == '\0');
}

// The path that is open as `descriptor`.
struct OpenPath {
  explicit OpenPath(int descriptor) {
    char link[64];
    (void)std::snprintf(link, sizeof(link), "/proc/self/fd/%d", descriptor);
    if (::readlink(link, text, sizeof(text) - 1) < 0) text[0] = '\0';
  }
  char text[PATH_MAX] = {};
};

void log_call(const char* name, const char* path) {
  const char* const file = setting("SLUICE_FAULT_LOG");
  if (*file == '\0') return;
  const int descriptor = next<int(const char*, int, mode_t)>("open")(
      file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  char line[PATH_MAX + 32];
  const int length = std::snprintf(line, sizeof(line), "%s %s\n", name, path);
  (void)!::write(descriptor, line, static_cast<std::size_t>(length));
  ::close(descriptor);
}

enum class Fate { kPass, kFail, kHalf };

Fate fate_of(const char* name, const char* path) {
  static std::atomic<long> calls{0};
  if (!is_inside(path)) return Fate::kPass;
  const int saved = errno;
  log_call(name, path);
  errno = saved;
  if (++calls != std::atol(setting("SLUICE_FAULT_AT"))) return Fate::kPass;
  if (const char* const mark = setting("SLUICE_FAULT_MARK"); *mark != '\0')
    ::close(
        next<int(const char*, int, mode_t)>("open")(mark, O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
  const int error = std::atoi(setting("SLUICE_FAULT_ERRNO"));
  if (error == 0) return Fate::kHalf;
  errno = error;
  return Fate::kFail;
}

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
                              fate == Fate::kHalf ? half_of(descriptor, size) : size, offset);
}

using Read = ssize_t(int, void*, size_t, off_t);
using Write = ssize_t(int, const void*, size_t, off_t);

int open_file(const char* name, const char* path, int flags, mode_t mode) {
  if (fails("open", path)) return -1;
  return next<int(const char*, int, mode_t)>(name)(path, flags, mode);
}

mode_t mode_of(int flags, va_list arguments) {
  return (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
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
      descriptor, data, fate == Fate::kHalf ? half_of(descriptor, size) : size);
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
