#include "engine/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "base/file_flush.h"
#include "engine/checkpoint/checkpoint_leftovers.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr const char* kLatest = "latest";
constexpr std::string_view kOwner = "host ";  // the beginning of a lock file
constexpr const char* kLockName = ".lock";
constexpr int kLockAttempts = 100;

[[noreturn]] void fail_with(std::string_view what, const std::string& path, int error) {
  const bool is_full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  const bool is_input = error == ENOENT || error == EACCES || error == ENOTDIR || error == EROFS ||
                        error == EPERM || error == EEXIST || error == ENAMETOOLONG;
  throw Error(
      file_error_code(error, is_input ? ErrorCode::kInput : ErrorCode::kIo),
      fmt::format("checkpoint: {} of \"{}\" failed: {}; {}{}", what, path, errno_text(error),
                  is_full ? "remove old checkpoints, or " : "", file_remedy(error)));
}

ProcessFd open_file(const std::string& path, int flags) {
  ProcessFd file =
      ProcessFd::opened_by([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); });
  if (!file) fail_with("open", path, errno);
  return file;
}

void write_all(int file, const std::string& path, std::uint64_t offset_bytes,
               std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done =
        ::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(offset_bytes));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail_with("write", path, errno);
    bytes = bytes.subspan(static_cast<std::size_t>(done));
    offset_bytes += static_cast<std::uint64_t>(done);
  }
}

void sync_file(int file, const std::string& path) {
  if (const int error = flush_file(file); error != 0) fail_with("fsync", path, error);
}

void sync_names(const std::string& path) {
  if (const int error = flush_folder(path); error != 0) fail_with("fsync", path, error);
}

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) fail_with("creation", path, error.value());
}

// At every moment, a checkpoint either has its name and is whole, or has no name.
void remove_checkpoint(const std::string& root, const CheckpointName& name) {
  const std::string path = root + "/" + name.text();
  const std::string doomed = removed_path(root, name.text());
  if (::rename(path.c_str(), doomed.c_str()) != 0) fail_with("removal", path, errno);
  std::error_code error;
  fs::remove_all(doomed, error);
  if (error) fail_with("removal", doomed, error.value());
}

void replace_link(const std::string& root, const std::string& target) {
  const std::string link = root + "/" + kLatest;
  const std::string fresh = unfinished_link(root);
  if (::unlink(fresh.c_str()) != 0 && errno != ENOENT) fail_with("removal", fresh, errno);
  if (::symlink(target.c_str(), fresh.c_str()) != 0) fail_with("creation", fresh, errno);
  if (::rename(fresh.c_str(), link.c_str()) == 0) return;
  const int error = errno;
  (void)::unlink(fresh.c_str());
  fail_with("renaming", link, error);
}

// A lock file is empty, or names its last owner. Writing to another file would destroy it.
bool is_lock_file(int file, const struct stat& status) {
  if (!S_ISREG(status.st_mode)) return false;
  std::array<char, kOwner.size()> begin{};
  const ssize_t bytes = ::pread(file, begin.data(), begin.size(), 0);
  return bytes >= 0 && kOwner.starts_with(std::string_view(begin.data(), bytes));
}

void write_owner(int file, const std::string& path) {
  std::array<char, 128> host{};
  (void)::gethostname(host.data(), host.size() - 1);
  const std::string owner = fmt::format("{}{}, process {}", kOwner, host.data(), ::getpid());
  if (::ftruncate(file, 0) != 0) fail_with("truncation", path, errno);
  write_all(file, path, 0, std::as_bytes(std::span(owner)));
}

// Returns whether the file system has no locks, such as Lustre without the option "flock".
bool is_without_locks(int error) {
  return error == ENOSYS || error == EOPNOTSUPP || error == ENOLCK || error == EBADF;
}

}  // namespace

std::string CheckpointName::text() const {
  return revision == 0 ? fmt::format("{}{:09}", kPrefix, step)
                       : fmt::format("{}{:09}.{}", kPrefix, step, revision);
}

std::optional<CheckpointName> checkpoint_name_from(std::string_view text) {
  if (!text.starts_with(kPrefix)) return std::nullopt;
  CheckpointName name;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data() + kPrefix.size(), end, name.step);
  if (parsed.ptr != end) (void)std::from_chars(parsed.ptr + 1, end, name.revision);
  if (name.text() != text) return std::nullopt;  // "step-3" is no name of a checkpoint
  return name;
}

std::vector<CheckpointName> list_checkpoints(const std::string& root) {
  std::vector<CheckpointName> names;
  std::error_code error;
  const bool is_there = fs::exists(root, error);
  if (error) fail_with("listing", root, error.value());  // not a folder without checkpoints
  if (!is_there) return names;
  fs::directory_iterator entries(root, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    if (const auto name = checkpoint_name_from(entries->path().filename().string()))
      names.push_back(*name);
  }
  if (error) fail_with("listing", root, error.value());
  std::ranges::sort(names, std::ranges::greater());
  return names;
}

struct CheckpointLock::Held {
  Held(ProcessFd locked, MissingPlaces places) : file(std::move(locked)), made(std::move(places)) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    // Closing is not enough: a child that is just being forked or spawned still has a copy, and
    // with it the lock, for a moment.
    if (!file) return;
    made.remove_file(file.get());
    (void)::flock(file.get(), LOCK_UN);
    made.remove_folders();
  }

  ProcessFd file;  // none in a forked child
  MissingPlaces made;
};

// The locks of this process, by file. A lock ends under `mutex`, so that no other object of the
// process meets one that is about to end.
struct CheckpointLock::Table {
  std::mutex mutex;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Held>> held;
};
CheckpointLock::Table& CheckpointLock::table() {
  static Table* const instance = new Table;  // outlives every object
  return *instance;
}

CheckpointLock::CheckpointLock(const std::string& root) {
  for (int left = kLockAttempts; !try_to_lock(root, left == 1);) --left;
}

// Returns false if the last owner has removed the file meanwhile. A lock of that file is none.
bool CheckpointLock::try_to_lock(const std::string& root, bool is_last) {
  MissingPlaces missing(root, kLockName);
  make_folder(root);
  const std::string path = fmt::format("{}/{}", root, kLockName);
  constexpr int kFlags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  const auto opened = [&](int access) {
    return ProcessFd::opened_by([&] { return ::open(path.c_str(), access | kFlags, 0666); });
  };
  ProcessFd file = opened(O_RDWR | O_CREAT);
  const bool is_own = static_cast<bool>(file);
  // Another user may let this one read the file. That is enough for a lock.
  if (!is_own && errno == EACCES) file = opened(O_RDONLY);
  const int failure = file ? 0 : errno;
  if (failure == ENOENT && !is_last) return false;
  if (!file && failure != ELOOP) fail_with("open", path, failure);
  struct stat status {};
  if (file && ::fstat(file.get(), &status) != 0) fail_with("stat", path, errno);
  if (!file || !is_lock_file(file.get(), status))
    throw Error(ErrorCode::kInput,
                fmt::format("checkpoint: \"{}\" is not a lock file of Sluice, which would "
                            "overwrite it; remove it, or name another folder",
                            path));
  const std::scoped_lock guard(table().mutex);
  std::weak_ptr<Held>& known = table().held[{status.st_dev, status.st_ino}];
  held_ = known.lock();
  if (held_ && held_->file) return true;
  if (take(root, path, file.get())) {
    if (!is_file_at(path.c_str(), file.get()) && !is_last) return false;
    if (is_own) write_owner(file.get(), path);
    std::ranges::move(remove_leftovers(root), std::back_inserter(notes_));
  } else {
    missing = {};  // another process may use them, too
  }
  known = held_ = std::make_shared<Held>(std::move(file), std::move(missing));
  return true;
}

CheckpointLock::~CheckpointLock() {
  const std::scoped_lock guard(table().mutex);
  held_.reset();
}

// Returns false if the file system has no locks.
bool CheckpointLock::take(const std::string& root, const std::string& path, int file) {
  if (::flock(file, LOCK_EX | LOCK_NB) != 0) {
    if (is_without_locks(errno)) {
      notes_.push_back(
          fmt::format("checkpoint: \"{}\" cannot be locked ({}): let no other process write to it, "
                      "and remove what killed ones leave",
                      root, errno_text(errno)));
      return false;
    }
    if (errno != EWOULDBLOCK) fail_with("locking", path, errno);
    std::array<char, 256> owner{};
    const ssize_t bytes = ::pread(file, owner.data(), owner.size(), 0);
    throw Error(
        ErrorCode::kInput,
        fmt::format("checkpoint: \"{}\" is being written by another process ({}); name "
                    "another folder, or end that one first",
                    root,
                    bytes > 0 ? std::string_view(owner.data(), bytes) : "which has just begun"));
  }
  return true;
}

NewCheckpoint::NewCheckpoint(const std::string& root) : root_(root), lock_(root) {
  notes_ = lock_.notes();
  const std::string path = unfinished_path(root);
  if (::mkdir(path.c_str(), 0777) != 0) fail_with("creation", path, errno);
  folder_ = path;
}

NewCheckpoint::~NewCheckpoint() {
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
}

void NewCheckpoint::create(const std::string& name, std::string_view beginning,
                           std::uint64_t size_bytes) const {
  const std::string path = folder_ + "/" + name;
  const ProcessFd file = open_file(path, O_WRONLY | O_CREAT | O_EXCL);
  const auto length = static_cast<off_t>(size_bytes);
  int result = 0;
  do {
    result = ::fallocate(file.get(), 0, 0, length);
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    if (errno != EOPNOTSUPP && errno != ENOSYS) fail_with("allocation", path, errno);
    if (::ftruncate(file.get(), length) != 0) fail_with("allocation", path, errno);
  }
  write_all(file.get(), path, 0, std::as_bytes(std::span(beginning)));
  sync_file(file.get(), path);  // a descriptor that is opened later may not be told of a failure
}

void NewCheckpoint::write(const std::string& name, std::string_view text) const {
  const std::string path = folder_ + "/" + name;
  const ProcessFd file = open_file(path, O_WRONLY | O_CREAT | O_EXCL);
  write_all(file.get(), path, 0, std::as_bytes(std::span(text)));
  sync_file(file.get(), path);
}

std::string NewCheckpoint::commit(
    std::uint64_t step, std::uint32_t keep,
    const std::function<CheckpointKin(const std::string& path)>& kin_of) {
  sync_names(folder_);
  std::vector<CheckpointName> names = list_checkpoints(root_);
  CheckpointName own{.step = step};
  for (const CheckpointName& name : names) {
    if (name.step == step) own.revision = std::max(own.revision, name.revision + 1);
  }
  const std::string path = root_ + "/" + own.text();
  if (::rename(folder_.c_str(), path.c_str()) != 0) fail_with("renaming", path, errno);
  folder_.clear();
  sync_names(root_);
  // From here on the checkpoint is there, whatever happens to the link and to older ones.
  attempt([&] {
    replace_link(root_, own.text());
    sync_names(root_);
  });
  std::uint32_t kept = 1;
  for (const CheckpointName& name : names) {
    const bool is_of_this_step = name.step == step;
    if (name.step > step) continue;  // a state beyond this step: kept
    if (keep == 0 && !is_of_this_step) continue;
    const std::string other = root_ + "/" + name.text();
    const CheckpointKin kin = kin_of(other);
    const bool is_over = keep != 0 && kept >= keep;
    if (kin == CheckpointKin::kForeign || kin == CheckpointKin::kDamaged) {
      const bool is_damaged = kin == CheckpointKin::kDamaged;
      if (is_of_this_step || is_over)
        note_that_stays(other, is_damaged ? "is damaged" : "is of another model");
    } else if (is_over || (is_of_this_step && kin == CheckpointKin::kSameState)) {
      attempt([&] { remove_checkpoint(root_, name); });
    } else {
      ++kept;
      if (is_of_this_step) note_that_stays(other, "is of another state of this step");
    }
  }
  return path;
}

void NewCheckpoint::note_that_stays(const std::string& path, const char* what) {
  notes_.push_back(
      fmt::format("checkpoint: \"{}\" {}, and stays; remove it if you do not want it", path, what));
}

void NewCheckpoint::attempt(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    notes_.emplace_back(error.what());
  }
}

CheckpointFile::CheckpointFile(const std::string& folder, const std::string& name)
    : path_(folder + "/" + name),
      file_(ProcessFd::opened_by([this] { return ::open(path_.c_str(), O_WRONLY | O_CLOEXEC); })) {
  if (!file_ && (errno == EMFILE || errno == ENFILE)) fail_with("open", path_, errno);
  if (!file_)
    throw Error(ErrorCode::kInput,
                fmt::format("checkpoint: \"{}\", which rank 0 has made, cannot be opened: {}; all "
                            "ranks have to see the same folder",
                            path_, errno_text(errno)));
  direct_ = ProcessFd::opened_by(
      [this] { return ::open(path_.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC); });
}

// Tensors begin anywhere, so the pages at both ends may be shared with other pieces. Those go
// through the page cache, which puts them together.
void CheckpointFile::write(std::uint64_t offset_bytes, std::span<const std::byte> bytes,
                           std::span<std::byte> room) {
  const std::uint64_t begin = align_up(offset_bytes, kPageBytes);
  const std::uint64_t end = (offset_bytes + bytes.size()) / kPageBytes * kPageBytes;
  if (!direct_ || begin >= end) return write_all(file_.get(), path_, offset_bytes, bytes);
  const std::uint64_t head = begin - offset_bytes;
  write_all(file_.get(), path_, offset_bytes, bytes.first(head));
  const std::uint64_t done = write_pages(begin, bytes.subspan(head, end - begin), room);
  write_all(file_.get(), path_, begin + done, bytes.subspan(head + done));
}

// Returns how many bytes have been written. The rest was refused, and is left to the page cache.
std::uint64_t CheckpointFile::write_pages(std::uint64_t offset_bytes,
                                          std::span<const std::byte> bytes,
                                          std::span<std::byte> room) {
  std::uint64_t done = 0;
  while (done < bytes.size()) {
    std::span<const std::byte> part = bytes.subspan(done);
    if (!is_aligned(std::bit_cast<std::uintptr_t>(part.data()), kPageBytes)) {
      part =
          part.first(std::min<std::uint64_t>(part.size(), room.size() / kPageBytes * kPageBytes));
      std::memcpy(room.data(), part.data(), part.size());
      part = room.first(part.size());
    }
    const ssize_t moved =
        ::pwrite(direct_.get(), part.data(), part.size(), static_cast<off_t>(offset_bytes + done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && errno != EINVAL) fail_with("write", path_, errno);
    const std::uint64_t pages = moved < 0 ? 0 : static_cast<std::uint64_t>(moved) / kPageBytes;
    if (pages == 0) break;
    done += pages * kPageBytes;
  }
  return done;
}

void CheckpointFile::sync() {
  sync_file(file_.get(), path_);
}

}  // namespace sluice
