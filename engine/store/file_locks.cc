#include "engine/store/file_locks.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/file_flush.h"
#include "base/process_fd.h"
#include "base/unique_fd.h"
#include "engine/store/store_lock.h"

namespace sluice {
namespace {

constexpr std::chrono::milliseconds kLockPoll{10};
// Waits below this are not worth a line: such as for the end of a child that was just being forked.
constexpr std::chrono::milliseconds kWaitNoticed{200};
// A pipe in a file's place would wait for another process.
constexpr int kLookFlags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;

// The file system of an open file, as /proc/locks names it: "fe:00". Not taken from st_dev, which
// on btrfs is the device of a subvolume. Empty if the kernel does not tell.
std::string device_of(int descriptor) {
  std::ifstream facts(fmt::format("/proc/self/fdinfo/{}", descriptor));
  std::string mount;
  for (std::string line; mount.empty() && std::getline(facts, line);) {
    std::istringstream words(line);
    std::string key;
    if (words >> key && key == "mnt_id:") words >> mount;
  }
  // "36 35 253:0 / /nvme0 rw ..."
  std::ifstream mounts("/proc/self/mountinfo");
  for (std::string line; !mount.empty() && std::getline(mounts, line);) {
    std::istringstream words(line);
    std::string id, parent;
    unsigned major_number = 0;
    unsigned minor_number = 0;
    char colon = 0;
    if (words >> id >> parent >> major_number >> colon >> minor_number && id == mount)
      return fmt::format("{:02x}:{:02x}", major_number, minor_number);
  }
  return {};
}

// The kernel's PF_EXITING. A process that was killed frees its memory before it closes its files.
constexpr unsigned kExiting = 4;
// Where storage.timeout sets no limit: a drive that hangs would keep a start waiting without a
// word.
constexpr double kLimitSeconds = 600;

// Whether the process runs no more instructions of its own, also where its files are still open, or
// some of its transfers are under way.
bool is_ending(pid_t process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  std::string text;
  std::getline(file, text);
  const std::size_t name_end = text.rfind(')');
  if (name_end == text.npos) return false;
  std::istringstream words(text.substr(name_end + 1));
  char state = 0;
  std::int64_t skipped = 0;
  unsigned flags = 0;
  words >> state;
  for (int i = 0; i < 5; ++i) words >> skipped;  // up to the terminal's group
  words >> flags;
  return state == 'Z' || state == 'X' || (flags & kExiting) != 0;
}

bool exists(pid_t process) {
  return ::kill(process, 0) == 0 || errno == EPERM;
}

std::string process_text(pid_t process) {
  return fmt::format("process {} on {}", process, host_name());
}

}  // namespace

std::optional<pid_t> flock_holder(int descriptor) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) return std::nullopt;
  // "1: FLOCK  ADVISORY  WRITE 4711 fe:00:123456 0 EOF"
  const std::string inode = fmt::format("{}:{}", device_of(descriptor), status.st_ino);
  std::ifstream locks("/proc/locks");
  std::string number, kind, mode, access, place;
  for (std::string line; std::getline(locks, line);) {
    std::istringstream words(line);
    pid_t process = 0;
    if (!(words >> number >> kind >> mode >> access >> process >> place) || kind != "FLOCK")
      continue;
    if (inode[0] == ':' ? place.ends_with(inode) : place == inode) return process;
  }
  return std::nullopt;
}

bool has_open(pid_t process, int descriptor) {
  struct stat wanted {};
  if (process <= 0 || ::fstat(descriptor, &wanted) != 0) return false;
  if (!exists(process) || is_ending(process)) return false;
  std::error_code error;
  std::filesystem::directory_iterator entry(fmt::format("/proc/{}/fd", process), error);
  if (error) return exists(process);  // of another user, or hidden
  for (const std::filesystem::directory_iterator end; !error && entry != end;
       entry.increment(error)) {
    struct stat found {};
    if (process == ::getpid() && entry->path().filename() == std::to_string(descriptor)) continue;
    if (::stat(entry->path().c_str(), &found) == 0 && found.st_dev == wanted.st_dev &&
        found.st_ino == wanted.st_ino)
      return true;
  }
  return false;
}

std::string file_user(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | kLookFlags));
  const std::optional<pid_t> process = file ? flock_holder(file.get()) : std::nullopt;
  if (!process) return {};
  if (has_open(*process, file.get())) return process_text(*process);
  return process_text(*process) +
         (exists(*process) && !is_ending(*process)
              ? ", whose last transfers are under way"
              : ", which has ended, and whose last transfers are under way");
}

FileLocks::FileLocks(double limit_s) : limit_s_(limit_s > 0 ? limit_s : kLimitSeconds) {}

void FileLocks::lock(int descriptor, const std::string& path) {
  const std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  std::optional<pid_t> ended;
  while (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (const int error = errno; error != EWOULDBLOCK)
      throw Error(
          file_error_code(error, ErrorCode::kIo),
          fmt::format("cannot lock {}: {}; {}", path, errno_text(error), file_remedy(error)));
    const std::optional<pid_t> process = flock_holder(descriptor);
    // A file that the process has closed may be in use by its transfers, or by a child that is just
    // being started.
    if (process && has_open(*process, descriptor))
      throw Error(ErrorCode::kInput,
                  fmt::format("{} is in use by {}, which may still write to it; wait for that "
                              "process to end, or end it",
                              path, process_text(*process)));
    if (process) ended = process;
    const std::chrono::steady_clock::duration waited =
        waited_ + (std::chrono::steady_clock::now() - begin);
    if (waited > std::chrono::duration<double>(limit_s_))
      throw Error(
          ErrorCode::kTimeout,
          fmt::format("{} is still in use by {} after {} s; wait for that to end, or check "
                      "the drive (dmesg), and start again",
                      path,
                      ended ? "the last transfers of " + process_text(*ended) + ", which has ended"
                            : "a process that is not known here, such as one in another container",
                      limit_s_));
    std::this_thread::sleep_for(kLockPoll);
  }
  const std::chrono::steady_clock::duration waited = std::chrono::steady_clock::now() - begin;
  if (waited >= kLockPoll && awaited_.empty()) awaited_ = path;
  waited_ += waited;
}

void FileLocks::await(const std::string& path) {
  // A network file system grants the lock only to files that are open for writing.
  const ProcessFd file =
      ProcessFd::opened_by([&] { return ::open(path.c_str(), O_RDWR | kLookFlags); });
  if (file) lock(file.get(), path);
}

std::string FileLocks::note() const {
  if (waited_ < kWaitNoticed) return {};
  return fmt::format(
      "storage: waited {:.1f} s for the last transfers of a process that has ended, "
      "in {}",
      std::chrono::duration<double>(waited_).count(), awaited_);
}

}  // namespace sluice
