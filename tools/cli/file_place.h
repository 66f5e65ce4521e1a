// The file that a path leads to. Links are followed, also to a file that does not exist yet, so
// that two paths of one file are noticed before either of them is opened. Thread rule: any thread.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace sluice {

enum class FileKind { kMissing, kRegular, kFolder, kBlockDevice, kOther };

struct FilePlace {
  std::string path;    // as the user gave it
  std::string folder;  // of the target: absolute, without links; empty = it does not exist
  std::string target;  // what is at the end of all links, or would be
  // One of this process's own, such as 1 for /dev/stdout.
  std::optional<int> descriptor;
  int error = 0;  // errno, where the path cannot be followed
  FileKind kind = FileKind::kMissing;
  // For an existing file:
  mode_t mode = 0;
  uid_t owner = 0;
  gid_t group = 0;
  dev_t device = 0;
  ino_t inode = 0;
  bool is_mount = false;  // a file that is mounted by itself cannot be replaced
};

FilePlace place_of(const std::string& path);

// The same regular file, or the same name for one that is missing. Devices and pipes are never the
// same.
bool is_same_file(const FilePlace& a, const FilePlace& b);

// The regular file that is open as `descriptor`, such as standard output; kOther for everything
// else.
FilePlace place_of_descriptor(int descriptor);

}  // namespace sluice
