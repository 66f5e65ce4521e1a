// A library for LD_PRELOAD: one call by which a process opens, writes, syncs, closes or renames a
// file in a folder fails, is cut short, or brings a signal. A close that fails has closed the file,
// as on a network file system.
//
// Environment: SLUICE_FAULT_FOLDER, the folder (absolute, without links). SLUICE_FAULT_AT, which of
// those calls, from 1; 0 = none. SLUICE_FAULT_ERRNO, what it fails with; else SLUICE_FAULT_SIGNAL,
// what comes before it is made; else a write writes only its first byte. SLUICE_FAULT_LOG, a file
// to which every such call adds a line: its name and the path. Thread rule: any thread.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

using OpenFunction = int(const char*, int, mode_t);
using WriteFunction = ssize_t(int, const void*, size_t);
using SyncFunction = int(int);
using RenameFunction = int(const char*, const char*);

const char* setting(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

bool is_inside(const char* path) {
  static const char* const folder = setting("SLUICE_FAULT_FOLDER");
  const std::size_t length = std::strlen(folder);
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
  const int descriptor =
      next<OpenFunction>("open")(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  char line[PATH_MAX + 32];
  const int length = std::snprintf(line, sizeof(line), "%s %s\n", name, path);
  [[maybe_unused]] const ssize_t written =
      next<WriteFunction>("write")(descriptor, line, static_cast<std::size_t>(length));
  ::close(descriptor);
}

enum class Fate { kPass, kFail, kCut };

Fate fate_of(const char* name, const char* path) {
  static std::atomic<long> calls{0};
  const int saved = errno;
  log_call(name, path);
  errno = saved;
  if (++calls != std::atol(setting("SLUICE_FAULT_AT"))) return Fate::kPass;
  if (const int error = std::atoi(setting("SLUICE_FAULT_ERRNO")); error != 0) {
    errno = error;
    return Fate::kFail;
  }
  const int number = std::atoi(setting("SLUICE_FAULT_SIGNAL"));
  if (number == 0) return Fate::kCut;
  (void)::kill(::getpid(), number);
  return Fate::kPass;
}

int open_file(const char* name, const char* path, int flags, mode_t mode) {
  const bool is_output = (flags & O_ACCMODE) != O_RDONLY && is_inside(path);
  if (is_output && fate_of("open", path) == Fate::kFail) return -1;
  return next<OpenFunction>(name)(path, flags, mode);
}

mode_t mode_of(int flags, va_list arguments) {
  return (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
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
    if (fate == Fate::kCut) size = 1;
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
