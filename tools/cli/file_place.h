// What a path leads to: links are followed, also to where nothing is yet, so that two paths can be
// told to mean one file before either of them is opened. Thread rule: any thread.
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
  // Of what is there:
  mode_t mode = 0;
  uid_t owner = 0;
  gid_t group = 0;
  dev_t device = 0;
  ino_t inode = 0;
  bool is_mount = false;  // a file that is mounted by itself cannot be replaced
};

FilePlace place_of(const std::string& path);

// The same regular file, or the same name for one that is missing. Devices and pipes are nobody's.
bool is_same_file(const FilePlace& a, const FilePlace& b);

// The regular file that is open as `descriptor`, such as standard output; kOther for all else.
FilePlace place_of_descriptor(int descriptor);

}  // namespace sluice
