#include "engine/store/store_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <ctime>
#include <fstream>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/file_flush.h"
#include "base/unique_fd.h"
#include "engine/store/file_locks.h"
#include "engine/store/store_files.h"

namespace sluice {
namespace {

// A pipe in a lock's place would wait for another process.
constexpr int kFlags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;

constexpr std::size_t kTextBytes = 512;  // a sector: written whole
constexpr const char* kTitle = "sluice store 1\n";
constexpr const char* kAnyTitle = "sluice store ";  // of any version

struct LockText {
  StoreMark mark;
  std::string job;
  std::string holder;
};

constexpr std::array<const char*, 3> kStages{"none", "creating", "made"};

std::string line_of(const std::string& text, const std::string& key) {
  const std::size_t begin = text.find("\n" + key + ": ");
  if (begin == std::string::npos) return {};
  const std::size_t from = begin + key.size() + 3;
  return text.substr(from, text.find('\n', from) - from);
}

std::optional<StoreId> id_of(const std::string& text) {
  StoreId id{};
  if (text.size() != 2 * id.size()) return std::nullopt;
  for (std::size_t i = 0; i < id.size(); ++i) {
    const char* begin = text.data() + 2 * i;
    if (std::from_chars(begin, begin + 2, id[i], 16).ptr != begin + 2) return std::nullopt;
  }
  return id;
}

LockText read_text(int descriptor, const std::string& path) {
  std::string text(kTextBytes, '\0');
  ssize_t count = 0;
  do {
    count = ::pread(descriptor, text.data(), text.size(), 0);
  } while (count < 0 && errno == EINTR);
  if (count < 0) {
    const int error = errno;
    throw Error(file_error_code(error, ErrorCode::kIo),
                fmt::format("cannot read {}: {}; {}", path, errno_text(error), file_remedy(error)));
  }
  text.resize(static_cast<std::size_t>(count));
  if (text.empty()) return {};
  LockText found{.mark = {},
                 .job = line_of(text, "job"),
                 .holder = fmt::format("process {} on {}, since {}", line_of(text, "pid"),
                                       line_of(text, "host"), line_of(text, "since"))};
  const std::string stage = line_of(text, "stage");
  const std::optional<StoreId> id = id_of(line_of(text, "id"));
  for (std::size_t i = 0; i < kStages.size(); ++i) {
    if (stage != kStages[i] || !id || !text.starts_with(kTitle)) continue;
    found.mark = {.stage = static_cast<StoreStage>(i), .id = *id};
    return found;
  }
  if (text.starts_with(kAnyTitle) && !text.starts_with(kTitle))
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} is of another version ({}); use the program that wrote it, or "
                            "choose another storage.state.name",
                            path, text.substr(0, text.find('\n'))));
  throw Error(ErrorCode::kDamaged,
              fmt::format("{} is not the lock file of a store, or is damaged; look at it, and "
                          "choose another storage.state.name if it is not Sluice's",
                          path));
}

std::string time_text() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  std::string text(32, '\0');
  text.resize(std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &utc));
  return text;
}

[[noreturn]] void throw_unusable(const std::string& path, int error) {
  const ErrorCode code = file_error_code(error, ErrorCode::kInput);
  throw Error(code, fmt::format("cannot open the lock file {}: {}; {}", path, errno_text(error),
                                code == ErrorCode::kInput
                                    ? "make the path writable, or name another one in storage.paths"
                                    : file_remedy(error)));
}

// 0, or the errno of the first call that failed. A signal is no failure.
int write_durably(int descriptor, const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t count =
        ::pwrite(descriptor, text.data() + done, text.size() - done, static_cast<off_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : ENOSPC;
    done += static_cast<std::size_t>(count);
  }
  while (::fdatasync(descriptor) != 0)
    if (errno != EINTR) return errno;
  return 0;
}

}  // namespace

std::string host_name() {
  std::string name(256, '\0');
  if (::gethostname(name.data(), name.size() - 1) != 0) return "this host";
  name.resize(name.find('\0'));
  return name;
}

StoreLock::StoreLock(const std::string& directory, const std::string& name, const std::string& job)
    : path_(directory + "/" + name + ".lock"), job_(job), descriptor_(ProcessFd::opened_by([this] {
        return ::open(path_.c_str(), O_RDWR | O_CREAT | kFlags, 0600);
      })) {
  if (!descriptor_) throw_unusable(path_, errno);
  if (::flock(descriptor_.get(), LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    if (error != EWOULDBLOCK) throw_unusable(path_, error);
    const LockText text = read_text(descriptor_.get(), path_);
    if (job.empty() || text.job != job)
      throw Error(ErrorCode::kInput,
                  fmt::format("the store \"{}\" in {} is in use by {}; wait for it to end, or "
                              "choose another storage.state.name",
                              name, directory, text.holder));
    mark_ = text.mark;
    descriptor_ = ProcessFd();
    return;
  }
  try {
    mark_ = read_text(descriptor_.get(), path_).mark;
  } catch (const Error& damage) {
    // It is the store's, if there are files of the store beside it: the mark is lost.
    if (damage.code() != ErrorCode::kDamaged || look_at_path(directory, name).files.empty()) throw;
  }
  write_text();  // names the holder
}

StoreLock::StoreLock(StoreLock&& other) noexcept = default;

// Closing is not enough: a child that is just being forked or spawned still has a copy, and with it
// the lock, for a moment.
StoreLock::~StoreLock() {
  if (descriptor_) (void)::flock(descriptor_.get(), LOCK_UN);
}

void StoreLock::set_mark(const StoreMark& mark) {
  SLUICE_CHECK(is_own(), "only the holder of a lock sets its mark");
  mark_ = mark;
  write_text();
  // The lock file itself may be new.
  const std::string folder = path_.substr(0, path_.rfind('/'));
  if (const int error = flush_folder(folder.empty() ? "/" : folder); error != 0)
    throw Error(file_error_code(error, ErrorCode::kIo),
                fmt::format("cannot make the name {} durable: {}; {}", path_, errno_text(error),
                            file_remedy(error)));
}

void StoreLock::write_text() {
  std::string text =
      fmt::format("{}stage: {}\nid: {}\nhost: {}\npid: {}\nsince: {}\njob: {}\n", kTitle,
                  kStages[static_cast<std::size_t>(mark_.stage)], text_of(mark_.id),
                  host_name().substr(0, 200), ::getpid(), time_text(), job_.substr(0, 64));
  text.resize(kTextBytes, '\n');
  if (const int error = write_durably(descriptor_.get(), text); error != 0)
    throw Error(
        file_error_code(error, ErrorCode::kIo),
        fmt::format("cannot write {}: {}; {}", path_, errno_text(error), file_remedy(error)));
}

std::optional<std::string> store_holder(const std::string& directory, const std::string& name) {
  const std::string path = directory + "/" + name + ".lock";
  const UniqueFd file(::open(path.c_str(), O_RDONLY | kFlags));
  if (!file || !flock_holder(file.get())) return std::nullopt;
  return read_text(file.get(), path).holder;
}

std::optional<StoreMark> read_store_mark(const std::string& directory, const std::string& name) {
  const std::string path = directory + "/" + name + ".lock";
  const UniqueFd file(::open(path.c_str(), O_RDONLY | kFlags));
  if (!file && errno == ENOENT) return std::nullopt;
  if (!file) throw_unusable(path, errno);
  return read_text(file.get(), path).mark;
}

}  // namespace sluice
