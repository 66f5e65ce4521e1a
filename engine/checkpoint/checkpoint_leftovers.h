// Names in a folder of checkpoints that begin with a dot: of checkpoints that are being written,
// and of those that are being removed. A killed process leaves them behind. A folder that was made
// and never used is a leftover, too.
//
// Thread rule: one thread, which has the folder's lock.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace sluice {

// The path under which a new checkpoint is written. The name is random.
std::string unfinished_path(const std::string& root);
// The path of the link that takes the place of "latest".
std::string unfinished_link(const std::string& root);
// The path under which the checkpoint `name` is removed. The name is random.
std::string removed_path(const std::string& root, const std::string& name);

// Removes what the three functions above have named. Other names stay, also if they begin in the
// same way, and so does what no checkpoint can be: files and links, and folders that hold something
// other than files. Returns a line of text for the user for each name.
std::vector<std::string> remove_leftovers(const std::string& root);

// Returns whether `path` is still the name of the open file `file`.
bool is_file_at(const char* path, int file);

// The file of a lock and the folder with its parents, as far as the lock has to make them. A
// refused run has used none of them.
class MissingPlaces {
 public:
  MissingPlaces() = default;
  // Notes which of them are missing. Must be called before they are made.
  MissingPlaces(const std::string& root, const std::string& lock_name);
  // Removes the lock file, which is open as `lock`, if it was missing, and if the folder holds
  // nothing else. Where another file has its name, everything stays: it is another process's.
  // Requires: the process has the lock.
  void remove_file(int lock) noexcept;
  // Removes those folders that were missing and are empty.
  void remove_folders() noexcept;

 private:
  std::filesystem::path file_;                  // empty: it was there
  std::vector<std::filesystem::path> folders_;  // a folder stands before its parent
};

}  // namespace sluice
