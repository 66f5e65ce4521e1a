// Finds the file to which a path leads. The function follows links, even to a file that does not
// exist yet. The command therefore notices two paths to the same file before any file is opened.
// Thread rule: any thread.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace sluice {

enum class FileKind { kMissing, kRegular, kFolder, kBlockDevice, kOther };

struct FilePlace {
  std::string path;    // the path as given by the user
  std::string folder;  // the target's folder; absolute, without links; empty = no such folder
  std::string target;  // the path at the end of all links; the file need not exist
  // This field is set if the path names a descriptor of this process. For example, /dev/stdout
  // names the descriptor 1.
  std::optional<int> descriptor;
  int error = 0;  // errno if the path cannot be followed
  FileKind kind = FileKind::kMissing;
  // The following fields are set only for a file that exists.
  mode_t mode = 0;
  uid_t owner = 0;
  gid_t group = 0;
  dev_t device = 0;
  ino_t inode = 0;
  bool is_mount = false;  // true: the file is a mount point, so it cannot be replaced
};

FilePlace place_of(const std::string& path);

// Returns true if `a` and `b` are the same regular file. If neither file exists, the result says
// whether both places have the same target. The result is false for devices and pipes.
bool is_same_file(const FilePlace& a, const FilePlace& b);

// Returns the place of the regular file that is open as `descriptor`. For example, `descriptor` may
// be standard output. If `descriptor` does not belong to a regular file, the result has the kind
// kOther.
FilePlace place_of_descriptor(int descriptor);

}  // namespace sluice
