// This header is for libraries that LD_PRELOAD puts before libc. The functions count the calls on
// the files in a folder, and write a log of the calls. The functions also let one of the
// calls fail.
//
//   SLUICE_FAULT_FOLDER=DIR  absolute, without links
//   SLUICE_FAULT_AT=N        the call that goes wrong, counted from 1; 0 = none
//   SLUICE_FAULT_ERRNO=E     the errno with which this call fails
//   SLUICE_FAULT_SIGNAL=S    the signal that is sent before this call; ignored if an errno is set
//   SLUICE_FAULT_MARK=FILE   a file that is created when this call comes
//   SLUICE_FAULT_LOG=FILE    gets a line for each call: its name and the path
//
// If neither an errno nor a signal is given, the chosen read or write moves only a part of its
// bytes.
// Thread rule: any thread.
#pragma once

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

namespace sluice::test {

// Returns libc's function `name`, although this library has a function of the same name.
template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

using OpenFunction = int(const char*, int, mode_t);

inline const char* fault_setting(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

inline bool is_inside(const char* path) {
  static const char* const folder = fault_setting("SLUICE_FAULT_FOLDER");
  static const std::size_t length = std::strlen(folder);
  return length != 0 && std::strncmp(path, folder, length) == 0 &&
         (path[length] == '/' || path[length] == '\0');
}

// The path of the file that is open as `descriptor`.
struct OpenPath {
  explicit OpenPath(int descriptor) {
    char link[64];
    (void)std::snprintf(link, sizeof(link), "/proc/self/fd/%d", descriptor);
    if (::readlink(link, text, sizeof(text) - 1) < 0) text[0] = '\0';
  }
  char text[PATH_MAX] = {};
};

inline int open_report(const char* path, int flags) {
  return next<OpenFunction>("open")(path, O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0644);
}

inline void log_call(const char* name, const char* path) {
  const char* const file = fault_setting("SLUICE_FAULT_LOG");
  if (*file == '\0') return;
  const int descriptor = open_report(file, O_APPEND);
  char line[PATH_MAX + 32];
  const int length = std::snprintf(line, sizeof(line), "%s %s\n", name, path);
  [[maybe_unused]] const ssize_t written = next<ssize_t(int, const void*, std::size_t)>("write")(
      descriptor, line, static_cast<std::size_t>(length));
  (void)next<int(int)>("close")(descriptor);
}

enum class Fate { kPass, kFail, kPart };

// The function counts the call if `path` is inside of the folder. If the result is kFail, errno
// holds the error.
inline Fate fate_of(const char* name, const char* path) {
  static std::atomic<long> calls{0};
  if (!is_inside(path)) return Fate::kPass;
  const int saved = errno;
  log_call(name, path);
  errno = saved;
  if (++calls != std::atol(fault_setting("SLUICE_FAULT_AT"))) return Fate::kPass;
  if (const char* const mark = fault_setting("SLUICE_FAULT_MARK"); *mark != '\0')
    (void)next<int(int)>("close")(open_report(mark, 0));
  if (const int error = std::atoi(fault_setting("SLUICE_FAULT_ERRNO")); error != 0) {
    errno = error;
    return Fate::kFail;
  }
  const int number = std::atoi(fault_setting("SLUICE_FAULT_SIGNAL"));
  if (number == 0) return Fate::kPart;
  (void)::kill(::getpid(), number);
  return Fate::kPass;
}

inline mode_t mode_of(int flags, va_list arguments) {
  return (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

}  // namespace sluice::test
