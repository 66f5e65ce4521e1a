// Put before libc by LD_PRELOAD: says in which phase of a commit a process dies, for the backends
// "sync" and "threads". Two counters lie in a mapped file, which outlives SIGKILL.
//
//   SLUICE_KILL_FOLDER=DIR        makes DIR/phase.PID: how many flushes and how many writes of a
//                                 commit record are under way, and whether the process has killed
//                                 itself; three 32-bit numbers
//   SLUICE_KILL_IN=flush|record   kills the process inside one of them
//   SLUICE_KILL_AT=N              in number N, counted from 0
//
// A process that kills itself in a record's write has written half of the record.
//
// Thread rule: any thread.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "engine/store/commit_format.h"

namespace {

using Sync = int (*)(int);
using Write = ssize_t (*)(int, const void*, size_t, off_t);
const auto real_fsync = reinterpret_cast<Sync>(dlsym(RTLD_NEXT, "fsync"));
const auto real_fdatasync = reinterpret_cast<Sync>(dlsym(RTLD_NEXT, "fdatasync"));
const auto real_write = reinterpret_cast<Write>(dlsym(RTLD_NEXT, "pwrite"));

struct Phase {
  std::atomic<std::uint32_t> flushes;
  std::atomic<std::uint32_t> records;
  std::atomic<std::uint32_t> has_killed;
};

std::string setting(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

Phase* map_phase() {
  static Phase nowhere{};
  const std::string folder = setting("SLUICE_KILL_FOLDER");
  if (folder.empty()) return &nowhere;
  const std::string path = folder + "/phase." + std::to_string(::getpid());
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ::ftruncate(file, sizeof(Phase)) != 0) return &nowhere;
  void* const memory = ::mmap(nullptr, sizeof(Phase), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  return memory == MAP_FAILED ? &nowhere : static_cast<Phase*>(memory);
}

Phase& phase() {
  static Phase* const mapped = map_phase();
  return *mapped;
}

// Whether the process dies in this event, the next one of its kind.
bool dies_here(const char* kind, std::atomic<std::uint64_t>& events) {
  static const std::string wanted = setting("SLUICE_KILL_IN");
  static const std::uint64_t at = std::strtoull(setting("SLUICE_KILL_AT").c_str(), nullptr, 10);
  return wanted == kind && events.fetch_add(1) == at;
}

[[noreturn]] void die() {
  phase().has_killed = 1;
  (void)::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

int flush(Sync real, int descriptor) {
  static std::atomic<std::uint64_t> events{0};
  ++phase().flushes;
  if (dies_here("flush", events)) die();
  const int result = real(descriptor);
  const int error = errno;
  --phase().flushes;
  errno = error;
  return result;
}

bool is_record(const void* data, size_t length) {
  std::uint64_t magic = 0;
  if (length < sizeof magic) return false;
  std::memcpy(&magic, data, sizeof magic);
  return magic == sluice::kCommitMagic;
}

}  // namespace

extern "C" int fsync(int descriptor) {
  return flush(real_fsync, descriptor);
}
extern "C" int fdatasync(int descriptor) {
  return flush(real_fdatasync, descriptor);
}

extern "C" ssize_t pwrite(int descriptor, const void* data, size_t length, off_t offset) {
  static std::atomic<std::uint64_t> events{0};
  if (!is_record(data, length)) return real_write(descriptor, data, length, offset);
  ++phase().records;
  if (dies_here("record", events)) {
    (void)!real_write(descriptor, data, length / 2 / 512 * 512, offset);
    die();
  }
  const ssize_t moved = real_write(descriptor, data, length, offset);
  const int error = errno;
  --phase().records;
  errno = error;
  return moved;
}
extern "C" ssize_t pwrite64(int descriptor, const void* data, size_t length, off64_t offset) {
  return pwrite(descriptor, data, length, offset);
}
