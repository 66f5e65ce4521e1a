// Put before libc by LD_PRELOAD: what a drive may do to the scratch files of the backends "sync"
// and "threads". It counts the reads and writes of files without a name, logs them, and at one of
// them does what the environment says:
//
//   SLUICE_SHIM_LOG=FILE   a line for every transfer: "r" or "w", offset, length; and one for the
//   event SLUICE_SHIM_AT=N       the event comes at transfer N, counted from 0, or at the next one
//   of its kind SLUICE_SHIM_DO=WHAT    to a read: eio, eagain, eagain_for_long, short, zero, flip
//                          to a write: eio, enospc, eagain, eagain_for_long, short, lost, torn,
//                          misdirected to the file, beside transfer N: bit, byte, sector,
//                          zero_page, copy, stale
//   SLUICE_SHIM_KIND=r|w   of the transfer that the event is for
//   SLUICE_SHIM_RANDOM=R   where in the file, and what
//
// Thread rule: any thread; transfers beside the event run at once.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace {

using Read = ssize_t (*)(int, void*, size_t, off_t);
using Write = ssize_t (*)(int, const void*, size_t, off_t);
const auto real_read = reinterpret_cast<Read>(dlsym(RTLD_NEXT, "pread"));
const auto real_write = reinterpret_cast<Write>(dlsym(RTLD_NEXT, "pwrite"));

std::string setting(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Guarded by `mutex`.
std::mutex mutex;
std::uint64_t transfers = 0;
bool has_happened = false;
std::uint32_t repeats_left = 0;
std::map<off_t, std::vector<char>> first_bytes;  // of each place, for "stale"

const std::string event = setting("SLUICE_SHIM_DO");
const std::string event_kind = setting("SLUICE_SHIM_KIND");
const std::uint64_t event_at =
    event.empty() ? UINT64_MAX : std::strtoull(setting("SLUICE_SHIM_AT").c_str(), nullptr, 10);
std::mt19937_64 generator(std::strtoull(setting("SLUICE_SHIM_RANDOM").c_str(), nullptr, 10));

void log_line(const std::string& line) {
  static const int file =
      ::open(setting("SLUICE_SHIM_LOG").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file >= 0) (void)!::write(file, line.data(), line.size());
}

bool is_scratch(int descriptor) {
  struct stat status {};
  return ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 0;
}

// The file itself, in the page cache: O_DIRECT would ask for alignment.
void change_file(int descriptor, off_t offset, size_t length) {
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return;
  const off_t at = offset + static_cast<off_t>(generator() % length);
  char bytes[4096];
  if (event == "bit" || event == "byte") {
    if (real_read(file, bytes, 1, at) == 1) {
      bytes[0] = static_cast<char>(bytes[0] ^ (event == "bit" ? 1 << generator() % 8 : 0x5a));
      (void)!real_write(file, bytes, 1, at);
    }
  } else if (event == "sector" || event == "zero_page") {
    const size_t size = event == "sector" ? 512 : 4096;
    for (char& byte : bytes) byte = event == "sector" ? static_cast<char>(generator()) : 0;
    (void)!real_write(file, bytes, size, at / static_cast<off_t>(size) * static_cast<off_t>(size));
  } else {
    std::vector<char> other(length);
    if (event == "stale") other = first_bytes[offset];
    if (event == "copy" && first_bytes.size() > 1) {
      auto source = std::next(first_bytes.begin(),
                              static_cast<std::ptrdiff_t>(generator() % first_bytes.size()));
      (void)!real_read(file, other.data(), length, source->first);
    }
    (void)!real_write(file, other.data(), other.size(), offset);
  }
  (void)::fsync(file);
  ::close(file);
}

// The place that the next transfer of the file will not be about: one that has been written.
std::pair<off_t, size_t> any_place() {
  auto place =
      std::next(first_bytes.begin(), static_cast<std::ptrdiff_t>(generator() % first_bytes.size()));
  return {place->first, place->second.size()};
}

enum class Turn { kOrdinary, kEvent };

Turn count(char kind, int descriptor, const void* data, size_t length, off_t offset) {
  const std::scoped_lock lock(mutex);
  const std::uint64_t number = transfers++;
  log_line(std::string(1, kind) + " " + std::to_string(offset) + " " + std::to_string(length) +
           "\n");
  if (kind == 'w' && !first_bytes.contains(offset)) {
    const auto* const bytes = static_cast<const char*>(data);
    first_bytes[offset] = std::vector<char>(bytes, bytes + length);
  }
  if (repeats_left > 0 && event_kind[0] == kind) {
    --repeats_left;
    return Turn::kEvent;
  }
  if (has_happened || number < event_at || event_kind.empty() || event_kind[0] != kind)
    return Turn::kOrdinary;
  has_happened = true;
  if (event == "eagain") repeats_left = 3;
  if (event == "eagain_for_long") repeats_left = 1000;
  log_line("event " + std::to_string(number) + "\n");
  for (const char* change : {"bit", "byte", "sector", "zero_page", "copy", "stale"}) {
    if (event != change) continue;
    if (!first_bytes.empty()) {
      const auto [at, size] = any_place();
      change_file(descriptor, at, size);
    }
    return Turn::kOrdinary;
  }
  return Turn::kEvent;
}

ssize_t fail(int error) {
  errno = error;
  return -1;
}

size_t some_pages(size_t length) {
  return std::max<size_t>(length / 2 / 4096 * 4096, length > 4096 ? 4096 : 512);
}

}  // namespace

extern "C" ssize_t pread(int descriptor, void* data, size_t length, off_t offset) {
  if (!is_scratch(descriptor) || count('r', descriptor, data, length, offset) == Turn::kOrdinary)
    return real_read(descriptor, data, length, offset);
  if (event == "eio") return fail(EIO);
  if (event.starts_with("eagain")) return fail(EAGAIN);
  if (event == "short") return real_read(descriptor, data, some_pages(length), offset);
  if (event == "zero") return 0;
  const ssize_t moved = real_read(descriptor, data, length, offset);
  if (event == "flip" && moved > 0)
    static_cast<char*>(data)[generator() % static_cast<std::uint64_t>(moved)] ^= 4;
  return moved;
}

extern "C" ssize_t pwrite(int descriptor, const void* data, size_t length, off_t offset) {
  if (!is_scratch(descriptor) || count('w', descriptor, data, length, offset) == Turn::kOrdinary)
    return real_write(descriptor, data, length, offset);
  if (event == "eio") return fail(EIO);
  if (event == "enospc") return fail(ENOSPC);
  if (event.starts_with("eagain")) return fail(EAGAIN);
  if (event == "short") return real_write(descriptor, data, some_pages(length), offset);
  if (event == "lost") return static_cast<ssize_t>(length);
  if (event == "torn") {
    (void)!real_write(descriptor, data, some_pages(length), offset);
    return static_cast<ssize_t>(length);
  }
  if (event == "misdirected") {
    off_t elsewhere = offset;
    {
      const std::scoped_lock lock(mutex);
      for (int tries = 0; tries < 20 && elsewhere == offset; ++tries) elsewhere = any_place().first;
    }
    (void)!real_write(descriptor, data, length, elsewhere);
    return static_cast<ssize_t>(length);
  }
  return real_write(descriptor, data, length, offset);
}

extern "C" ssize_t pread64(int descriptor, void* data, size_t length, off64_t offset) {
  return pread(descriptor, data, length, offset);
}
extern "C" ssize_t pwrite64(int descriptor, const void* data, size_t length, off64_t offset) {
  return pwrite(descriptor, data, length, offset);
}
