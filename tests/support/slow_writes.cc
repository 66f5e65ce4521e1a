// Stands before libc's pwrite() and fsync() in the program that is linked with it.
#include "tests/support/slow_writes.h"

#include <dlfcn.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string_view>
#include <thread>

namespace sluice::test {
namespace {

std::atomic<std::int64_t> wait_us = 0;
std::atomic<int> writes = 0;

struct Fault {
  std::atomic<int> calls_left = -1;
  std::atomic<int> error = 0;

  void set(int number, int with) {
    error = with;
    calls_left = number;
  }
  bool strikes() {
    if (calls_left < 0 || calls_left.fetch_sub(1) != 0) return false;
    errno = error;
    return true;
  }
};
Fault write_fault;
Fault sync_fault;

bool is_writer() {
  char name[16] = {};
  (void)::prctl(PR_GET_NAME, name);
  return std::string_view(name) == "sluice-state";
}

}  // namespace

SlowWrites::SlowWrites(std::chrono::microseconds wait) {
  wait_us = wait.count();
}

SlowWrites::~SlowWrites() {
  wait_us = 0;
}

int count_writes() {
  return writes;
}

void fail_write(int number, int error) {
  write_fault.set(number, error);
}

void fail_sync(int number, int error) {
  sync_fault.set(number, error);
}

}  // namespace sluice::test

extern "C" ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  using Function = ssize_t(int, const void*, size_t, off_t);
  static auto* const next = reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, "pwrite"));
  if (sluice::test::is_writer()) {
    ++sluice::test::writes;
    std::this_thread::sleep_for(std::chrono::microseconds(sluice::test::wait_us));
    if (sluice::test::write_fault.strikes()) return -1;
  }
  return next(file, data, size, offset);
}

extern "C" int fsync(int file) {
  using Function = int(int);
  static auto* const next = reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, "fsync"));
  if (sluice::test::is_writer() && sluice::test::sync_fault.strikes()) return -1;
  return next(file);
}
