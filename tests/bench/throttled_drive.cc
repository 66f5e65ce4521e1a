// Put before libc by LD_PRELOAD: makes the scratch files of the backends "sync" and "threads" as
// slow as a drive of a given rate and latency, half duplex, so that the drive and not the machine
// decides how long a step takes. On a machine with other work, a run repeats only under SCHED_RR:
// tune_grid.py --real-time. Real transfers must be faster.
//
//   SLUICE_DRIVE_RATE=N      bytes a second, of reads and writes together
//   SLUICE_DRIVE_LATENCY=N   microseconds of a request, after its transfer, which the requests in
//                            flight share
//
// Thread rule: any thread. The times follow from the arrivals, so late wake-ups do not add up.
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
using Read = ssize_t (*)(int, void*, size_t, off_t);
using Write = ssize_t (*)(int, const void*, size_t, off_t);
const auto real_read = reinterpret_cast<Read>(dlsym(RTLD_NEXT, "pread"));
const auto real_write = reinterpret_cast<Write>(dlsym(RTLD_NEXT, "pwrite"));

double setting(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? 0 : std::strtod(value, nullptr);
}

const double bytes_per_second = setting("SLUICE_DRIVE_RATE");
const Seconds latency(setting("SLUICE_DRIVE_LATENCY") * 1e-6);

std::mutex mutex;
Clock::time_point free_at;  // guarded by `mutex`

bool is_scratch(int descriptor) {
  struct stat status {};
  return ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 0;
}

// Returns when a transfer that arrives now has ended on the emulated drive.
Clock::time_point end_of(size_t size_bytes) {
  const Seconds moving(static_cast<double>(size_bytes) / bytes_per_second);
  const std::scoped_lock lock(mutex);
  free_at = std::max(free_at, Clock::now()) + std::chrono::duration_cast<Clock::duration>(moving);
  return free_at + std::chrono::duration_cast<Clock::duration>(latency);
}

template <class Transfer>
ssize_t at_rate(int descriptor, size_t size_bytes, const Transfer& transfer) {
  if (!(bytes_per_second > 0) || !is_scratch(descriptor)) return transfer();
  const Clock::time_point end = end_of(size_bytes);
  const ssize_t moved = transfer();
  const int error = errno;
  std::this_thread::sleep_until(end);
  errno = error;
  return moved;
}

}  // namespace

extern "C" {

ssize_t pread(int descriptor, void* target, size_t size_bytes, off_t offset) {
  return at_rate(descriptor, size_bytes,
                 [&] { return real_read(descriptor, target, size_bytes, offset); });
}

ssize_t pwrite(int descriptor, const void* source, size_t size_bytes, off_t offset) {
  return at_rate(descriptor, size_bytes,
                 [&] { return real_write(descriptor, source, size_bytes, offset); });
}

ssize_t pread64(int descriptor, void* target, size_t size_bytes, off_t offset) {
  return pread(descriptor, target, size_bytes, offset);
}

ssize_t pwrite64(int descriptor, const void* source, size_t size_bytes, off_t offset) {
  return pwrite(descriptor, source, size_bytes, offset);
}

}  // extern "C"
