// Put before libc by LD_PRELOAD: a call on a file waits until another process lets it go on. So a
// test sees what a command shows in the middle of its work, and no test depends on how long work
// takes.
//
//   SLUICE_HELD_CALL=NAME   the call that waits, "open" or "fsync"
//   SLUICE_HELD_PATH=TEXT   only calls on files whose path has this text wait
//   SLUICE_HELD_UNTIL=FILE  the calls go on once this file exists
//
// Thread rule: any thread.
#include "tests/support/preloaded_faults.h"

namespace {

using namespace sluice::test;

void hold(const char* call, const char* path) {
  const char* const part = fault_setting("SLUICE_HELD_PATH");
  if (*part == '\0' || std::strstr(path, part) == nullptr) return;
  if (std::strcmp(call, fault_setting("SLUICE_HELD_CALL")) != 0) return;
  const int saved = errno;
  while (::access(fault_setting("SLUICE_HELD_UNTIL"), F_OK) != 0) ::usleep(10'000);
  errno = saved;
}

int open_held(const char* name, const char* path, int flags, mode_t mode) {
  hold("open", path);
  return next<OpenFunction>(name)(path, flags, mode);
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_held("open", path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_held("open64", path, flags, mode);
}

int fsync(int descriptor) {
  const OpenPath path(descriptor);
  hold("fsync", path.text);
  return next<int(int)>("fsync")(descriptor);
}

}  // extern "C"
