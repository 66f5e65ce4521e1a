#include "tools/cli/temporary_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "base/random_suffix.h"

namespace sluice {
namespace {

constexpr int kAttemptsMax = 100;
constexpr std::string_view kMark = ".sluice-";
constexpr std::string_view kEnd = ".tmp";
constexpr std::size_t kRandomDigits = 16;
// The part of a file name that is left for the target's own.
constexpr std::size_t kStemMax = NAME_MAX - kMark.size() - kRandomDigits - kEnd.size();

// Names that a signal handler removes. A command has a handful of outputs; a name beyond the table,
// or too long for it, stays when a signal ends the process, and that is all.
struct Slot {
  enum State : int { kFree, kChanging, kUsed };
  std::atomic<int> state{kFree};
  char name[PATH_MAX] = {};
};
std::array<Slot, 16> slots;

int take_slot(const std::string& name) noexcept {
  if (name.size() >= PATH_MAX) return -1;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    int expected = Slot::kFree;
    if (!slots[i].state.compare_exchange_strong(expected, Slot::kChanging)) continue;
    std::memcpy(slots[i].name, name.c_str(), name.size() + 1);
    slots[i].state.store(Slot::kUsed);
    return static_cast<int>(i);
  }
  return -1;
}

// "/folder/name" as "/folder/" and the part of "name" that temporary names begin with.
std::pair<std::string, std::string> folder_and_stem(const std::string& target) {
  const std::size_t begin = target.rfind('/') + 1;
  return {target.substr(0, begin), target.substr(begin, kStemMax)};
}

bool is_temporary_name(std::string_view name, std::string_view stem) {
  if (name.size() != stem.size() + kMark.size() + kRandomDigits + kEnd.size()) return false;
  if (!name.starts_with(stem) || !name.ends_with(kEnd)) return false;
  name.remove_prefix(stem.size());
  if (!name.starts_with(kMark)) return false;
  return std::ranges::all_of(name.substr(kMark.size(), kRandomDigits), [](char digit) {
    return (digit >= '0' && digit <= '9') || (digit >= 'a' && digit <= 'f');
  });
}

}  // namespace

TemporaryFile::TemporaryFile(const std::string& target, mode_t mode) : target_(target) {
  const auto [folder, stem] = folder_and_stem(target);
  for (int attempt = 0; !descriptor_; ++attempt) {
    const std::string name = fmt::format("{}{}{}{}{}", folder, stem, kMark, random_suffix(), kEnd);
    const int slot = take_slot(name);  // before the name exists: a signal may come in between
    descriptor_ =
        UniqueFd(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOCTTY, mode));
    const int error = errno;
    if (descriptor_) {
      name_ = name;
      slot_ = slot;
      (void)::flock(descriptor_.get(), LOCK_EX | LOCK_NB);  // where there are no locks, no matter
      return;
    }
    if (slot >= 0) slots[static_cast<std::size_t>(slot)].state.store(Slot::kFree);
    if (error != EEXIST || attempt == kAttemptsMax)
      throw std::system_error(error, std::generic_category());
  }
}

TemporaryFile::TemporaryFile(TemporaryFile&& other) noexcept
    : target_(std::move(other.target_)),
      name_(std::exchange(other.name_, {})),
      slot_(std::exchange(other.slot_, -1)),
      descriptor_(std::move(other.descriptor_)) {}

TemporaryFile& TemporaryFile::operator=(TemporaryFile&& other) noexcept {
  std::swap(target_, other.target_);
  std::swap(name_, other.name_);
  std::swap(slot_, other.slot_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

TemporaryFile::~TemporaryFile() {
  if (!name_.empty()) (void)::unlink(name_.c_str());
  forget_name();
}

int TemporaryFile::replace_target() {
  if (::rename(name_.c_str(), target_.c_str()) != 0) return errno;
  forget_name();
  return 0;
}

void TemporaryFile::keep() {
  forget_name();
}

void TemporaryFile::forget_name() noexcept {
  if (slot_ >= 0) slots[static_cast<std::size_t>(slot_)].state.store(Slot::kFree);
  slot_ = -1;
  name_.clear();
}

std::vector<std::string> leftovers_of(const std::string& target) {
  const auto [folder, stem] = folder_and_stem(target);
  std::vector<std::string> found;
  const auto close_folder = [](DIR* open_folder) { ::closedir(open_folder); };
  const std::unique_ptr<DIR, decltype(close_folder)> all(::opendir(folder.c_str()), close_folder);
  while (all != nullptr) {
    const dirent* const entry = ::readdir(all.get());
    if (entry == nullptr) break;
    if (!is_temporary_name(entry->d_name, stem)) continue;
    const std::string name = folder + entry->d_name;
    const UniqueFd file(::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
    if (file && ::flock(file.get(), LOCK_SH | LOCK_NB) == 0) found.push_back(name);
  }
  std::ranges::sort(found);
  return found;
}

bool is_being_written(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
  return file && ::flock(file.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

void remove_temporary_files() noexcept {
  for (const Slot& slot : slots) {
    if (slot.state.load() == Slot::kUsed) (void)::unlink(slot.name);
  }
}

}  // namespace sluice
