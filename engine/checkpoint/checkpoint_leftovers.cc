#include "engine/checkpoint/checkpoint_leftovers.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/random_suffix.h"
#include "engine/checkpoint/checkpoint_folder.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kUnfinished = ".new-";
constexpr std::string_view kRemoved = ".old-";
constexpr std::string_view kLink = "latest";
constexpr std::size_t kSuffixDigits = 16;  // of random_suffix()

bool is_suffix(std::string_view text) {
  return text.size() == kSuffixDigits && std::ranges::all_of(text, [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

// A checkpoint's folder has only files.
bool is_checkpoint_folder(const fs::path& path) {
  std::error_code error;
  if (!fs::is_directory(fs::symlink_status(path, error))) return false;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error)) {
    if (!entry->is_regular_file(error) || entry->is_symlink(error)) return false;
  }
  return true;  // one that cannot be listed cannot be removed, either, and is named
}

bool is_unfinished(const fs::path& path, std::string_view name) {
  if (!name.starts_with(kUnfinished)) return false;
  name.remove_prefix(kUnfinished.size());
  std::error_code error;
  if (name == kLink) return fs::is_symlink(path, error);
  return is_suffix(name) && is_checkpoint_folder(path);
}

bool is_removed(const fs::path& path, std::string_view name) {
  if (!name.starts_with(kRemoved)) return false;
  name.remove_prefix(kRemoved.size());
  const std::size_t dash = name.rfind('-');
  return dash != std::string_view::npos && is_suffix(name.substr(dash + 1)) &&
         checkpoint_name_from(name.substr(0, dash)) && is_checkpoint_folder(path);
}

}  // namespace

std::string unfinished_path(const std::string& root) {
  return fmt::format("{}/{}{}", root, kUnfinished, random_suffix());
}

std::string unfinished_link(const std::string& root) {
  return fmt::format("{}/{}{}", root, kUnfinished, kLink);
}

std::string removed_path(const std::string& root, const std::string& name) {
  return fmt::format("{}/{}{}-{}", root, kRemoved, name, random_suffix());
}

// Those that cannot be removed are in nothing's way.
std::vector<std::string> remove_leftovers(const std::string& root) {
  std::vector<fs::path> paths;
  std::vector<std::string> notes;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(root, error))
    paths.push_back(entry.path());
  for (const fs::path& path : paths) {
    const std::string name = path.filename().string();
    const bool is_new = is_unfinished(path, name);
    if (!is_new && !is_removed(path, name)) continue;
    fs::remove_all(path, error);
    notes.push_back(fmt::format(
        "checkpoint: \"{}/{}\" {}, and {}", root, name,
        is_new ? "was never finished" : "is what is left of a removed checkpoint",
        error ? "cannot be removed: " + errno_text(error.value()) : "has been removed"));
  }
  return notes;
}

bool is_file_at(const char* path, int file) {
  struct stat there {
  }, opened{};
  return ::lstat(path, &there) == 0 && ::fstat(file, &opened) == 0 &&
         there.st_dev == opened.st_dev && there.st_ino == opened.st_ino;
}

MissingPlaces::MissingPlaces(const std::string& root, const std::string& lock_name) {
  std::error_code error;
  fs::path folder = fs::absolute(root, error);
  if (error) return;
  if (!folder.has_filename()) folder = folder.parent_path();  // "saved/"
  if (!fs::exists(fs::symlink_status(folder / lock_name, error))) file_ = folder / lock_name;
  for (; !fs::exists(folder, error) && !error && folder != folder.parent_path();
       folder = folder.parent_path())
    folders_.push_back(folder);
}

void MissingPlaces::remove_file(int lock) noexcept {
  std::error_code error;
  if (file_.empty()) return;
  // A user may have removed the folder, and begun another run in a new one.
  if (!is_file_at(file_.c_str(), lock)) return folders_.clear();
  for (fs::directory_iterator entry(file_.parent_path(), error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path() != file_) return;
  }
  if (!error) fs::remove(file_, error);
}

void MissingPlaces::remove_folders() noexcept {
  for (const fs::path& folder : folders_) {
    if (::rmdir(folder.c_str()) != 0) return;
  }
}

}  // namespace sluice
