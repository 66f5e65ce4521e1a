#include "engine/run/status_page.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <span>
#include <thread>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/version.h>
#include "base/unique_fd.h"
#include "io/checksum.h"

namespace sluice {
namespace {

constexpr std::size_t kStatusPageBytes = 4096;
constexpr std::array<char, 8> kStatusMagic{'S', 'L', 'U', 'I', 'C', 'E', 'S', 'P'};
constexpr std::uint32_t kStatusFormat = 3;  // to be raised when RunStatus changes

// The file's contents.
struct StatusFile {
  std::array<char, 8> magic;
  std::uint32_t format;
  std::uint32_t version;   // SLUICE_VERSION
  std::uint64_t sequence;  // odd while the rest is being written
  std::uint64_t checksum;  // of status
  RunStatus status;
};
static_assert(sizeof(StatusFile) <= kStatusPageBytes && std::is_trivially_copyable_v<StatusFile>);

std::uint64_t status_checksum(const RunStatus& status) {
  return checksum(std::as_bytes(std::span(&status, 1)));
}

std::int64_t unix_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

[[noreturn]] void fail_page(const char* what, const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kIo,
              fmt::format("cannot {} the status page \"{}\": {}; set run.status to \"off\" to do "
                          "without",
                          what, path, why));
}

[[noreturn]] void fail_page(const char* what, const std::string& path, int error) {
  fail_page(what, path, errno_text(error));
}

// A consistent copy, or why there is none.
std::string copy_page(const std::byte* memory, StatusFile& copy) {
  std::memcpy(&copy, memory, sizeof copy);
  if (copy.magic != kStatusMagic) return "is not a status page";
  if (copy.format != kStatusFormat || copy.version != SLUICE_VERSION)
    return fmt::format("is of another version of Sluice (format {}, version {})", copy.format,
                       copy.version);
  const auto sequence_of = [&] {
    std::uint64_t sequence = 0;
    std::memcpy(&sequence, memory + offsetof(StatusFile, sequence), sizeof sequence);
    std::atomic_thread_fence(std::memory_order_acquire);
    return sequence;
  };
  constexpr int kCopyAttempts = 100;  // a write takes about a microsecond
  for (int attempt = 0; attempt < kCopyAttempts; ++attempt) {
    const std::uint64_t before = sequence_of();
    std::memcpy(&copy, memory, sizeof copy);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (before % 2 == 0 && sequence_of() == before)
      return copy.checksum == status_checksum(copy.status) ? ""
                                                           : "is damaged: its checksum is wrong";
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return "is torn: its writer has stopped in the middle of it";
}

std::string read_status(int file, FoundPage& page) {
  struct stat info {};
  if (::fstat(file, &info) != 0) return errno_text(errno);
  if (!S_ISREG(info.st_mode)) return "is not a regular file";
  if (info.st_uid != ::geteuid()) return fmt::format("belongs to user {}", info.st_uid);
  if ((info.st_mode & 077) != 0)
    return fmt::format("is open to others (mode {:o})", info.st_mode & 0777);
  if (info.st_size != kStatusPageBytes)
    return fmt::format("has {} bytes instead of {}", info.st_size, kStatusPageBytes);
  void* const memory = ::mmap(nullptr, kStatusPageBytes, PROT_READ, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return errno_text(errno);
  StatusFile copy{};
  std::string problem = copy_page(static_cast<const std::byte*>(memory), copy);
  ::munmap(memory, kStatusPageBytes);
  if (!problem.empty()) return problem;
  if (std::to_string(copy.status.pid) != page.name)
    return fmt::format("says that it is of process {}", copy.status.pid);
  page.status = copy.status;
  return {};
}

// Whether the name is a process number, as StatusPage gives them.
bool is_page_name(const std::string& name) {
  std::uint32_t pid = 0;
  const auto parsed = std::from_chars(name.data(), name.data() + name.size(), pid);
  return parsed.ec == std::errc{} && parsed.ptr == name.data() + name.size();
}

// Whether the path names the open file, which another process may have removed or replaced.
bool is_at(int file, const std::string& path) {
  struct stat own {};
  struct stat named {};
  return ::fstat(file, &own) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         own.st_dev == named.st_dev && own.st_ino == named.st_ino;
}

// Nothing, if the page's process has removed it meanwhile.
std::optional<FoundPage> look_at(const std::string& folder, const std::string& name) {
  FoundPage page;
  page.name = name;
  const std::string path = folder + "/" + name;
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file) {
    if (errno == ENOENT) return std::nullopt;
    page.problem = errno == ELOOP ? "is a symbolic link" : errno_text(errno);
    return page;
  }
  // A writer that lives holds the lock.
  page.is_alive = ::flock(file.get(), LOCK_SH | LOCK_NB) != 0;
  if (!page.is_alive && !is_at(file.get(), path)) return std::nullopt;
  page.problem = read_status(file.get(), page);
  // Only what is certainly a page.
  const bool is_own_page = page.status.has_value() || page.problem.starts_with("is torn") ||
                           page.problem.starts_with("is damaged");
  if (!page.is_alive && is_own_page && is_at(file.get(), path)) ::unlink(path.c_str());
  return page;
}

}  // namespace

std::string_view DriveStatus::name() const {
  return {path.data(), ::strnlen(path.data(), path.size())};
}

std::string_view name_of(StatusLink link) {
  constexpr std::array<std::string_view, kStatusLinks> kNames{"storage_read", "storage_write",
                                                              "copy_to_device", "copy_from_device"};
  return kNames[static_cast<std::size_t>(link)];
}

TraceReason RunStatus::longest_wait() const {
  // The first entry has the time without a reason.
  const auto longest = std::max_element(wait_ns.begin() + 1, wait_ns.end());
  if (*longest <= 0) return TraceReason::kNone;
  return static_cast<TraceReason>(longest - wait_ns.begin());
}

StatusPage::StatusPage(const std::string& folder)
    : owner_(::getpid()), started_unix_ns_(unix_now_ns()) {
  if (folder.empty()) return;
  path_ = fmt::format("{}/{}", folder, owner_);
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    fail_page("make the folder of", path_, errno);
  // A process of another container or namespace may have the same number.
  const UniqueFd other(::open(path_.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (other && ::flock(other.get(), LOCK_SH | LOCK_NB) != 0)
    fail_page("make", path_,
              "a live process of this number has it, such as one in another container; give each "
              "container an XDG_RUNTIME_DIR of its own");
  // Locked and filled before it gets its name, so that no reader takes it for a dead process's.
  const std::string temporary = path_ + ".new";
  ::unlink(temporary.c_str());
  ProcessFd file = ProcessFd::opened_by([&] {
    return ::open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  });
  if (!file) fail_page("create", path_, errno);
  int error = ::flock(file.get(), LOCK_EX | LOCK_NB) != 0 ? errno : 0;
  // With blocks behind it: a write into a hole of a full file system would end the process.
  if (error == 0) error = ::posix_fallocate(file.get(), 0, kStatusPageBytes);
  void* memory = MAP_FAILED;
  if (error == 0) {
    // A child has neither descriptor nor mapping: each keeps the lock, and so the page of a killed
    // parent would seem alive as long as the child runs.
    memory = map_in_this_process(nullptr, kStatusPageBytes, PROT_READ | PROT_WRITE, MAP_POPULATE,
                                 file.get());
    if (memory == MAP_FAILED) error = errno;
  }
  if (error == 0) {
    StatusFile page{.magic = kStatusMagic,
                    .format = kStatusFormat,
                    .version = SLUICE_VERSION,
                    .sequence = 0,
                    .checksum = 0,
                    .status = {}};
    std::memcpy(memory, &page, sizeof page);
    memory_ = static_cast<std::byte*>(memory);
    file_ = std::move(file);
    write({});
    if (::rename(temporary.c_str(), path_.c_str()) == 0) return;
    error = errno;
  }
  ::unlink(temporary.c_str());
  if (memory != MAP_FAILED) ::munmap(memory, kStatusPageBytes);
  memory_ = nullptr;
  fail_page("make", path_, error);
}

StatusPage::~StatusPage() {
  if (memory_ == nullptr || ::getpid() != owner_) return;  // a child has no mapping
  if (is_at(file_.get(), path_)) ::unlink(path_.c_str());
  ::munmap(memory_, kStatusPageBytes);
}

void StatusPage::write(RunStatus status) noexcept {
  if (memory_ == nullptr || ::getpid() != owner_) return;
  status.pid = static_cast<std::uint32_t>(owner_);
  status.started_unix_ns = started_unix_ns_;
  status.updated_unix_ns = unix_now_ns();
  const std::uint64_t checksum = status_checksum(status);
  const std::atomic_ref sequence(reinterpret_cast<StatusFile*>(memory_)->sequence);
  const std::uint64_t next = sequence.load(std::memory_order_relaxed) + 1;
  sequence.store(next, std::memory_order_relaxed);
  // Nothing below may be seen before the odd number, nor above after the even one.
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(memory_ + offsetof(StatusFile, status), &status, sizeof status);
  std::memcpy(memory_ + offsetof(StatusFile, checksum), &checksum, sizeof checksum);
  sequence.store(next + 1, std::memory_order_release);
}

std::string status_folder() {
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  return runtime == nullptr || *runtime == '\0' ? "" : std::string(runtime) + "/sluice";
}

std::vector<FoundPage> read_status_pages(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (is_page_name(name)) names.push_back(name);
  }
  if (error && error != std::errc::no_such_file_or_directory)
    throw Error(ErrorCode::kIo,
                fmt::format("cannot read the status pages in \"{}\": {}; if the folder is another "
                            "user's, set XDG_RUNTIME_DIR to one of your own",
                            folder, errno_text(error.value())));
  std::ranges::sort(names, {}, [](const std::string& name) { return std::stoul(name); });
  std::vector<FoundPage> pages;
  for (const std::string& name : names) {
    if (std::optional<FoundPage> page = look_at(folder, name)) pages.push_back(*std::move(page));
  }
  return pages;
}

}  // namespace sluice
