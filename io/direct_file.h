// A file for O_DIRECT transfers, preallocated to its full size. It is either a scratch file without
// a name, whose space the kernel frees however the process ends, or a file that gets a name later.
// Movable, one owner; the descriptor may be used from any thread.
#pragma once

#include <cstdint>
#include <string>

#include "base/unique_fd.h"

namespace sluice {

// The bytes that an unprivileged user may still write in the file system of `directory`.
// Fails with: kInput.
std::uint64_t free_bytes(const std::string& directory);

class DirectFile {
 public:
  // Creates an unnamed file of `size_bytes` (rounded up to whole pages) in `directory`, mode 0600:
  // O_TMPFILE, or a file unlinked at once where the file system lacks it. Space is allocated here,
  // so that ENOSPC cannot happen later.
  // Fails with: kInput (`directory` missing, not a directory, not writable, on a file system that
  // cannot preallocate), kNoSpace (names needed and free bytes), kIo.
  static DirectFile create_scratch(const std::string& directory, std::uint64_t size_bytes);

  // As create_scratch(), for a file that link_as() can name; it is exempt from copy-on-write where
  // the file system has a flag for that.
  // Fails with: as create_scratch(); kUnsupported where the file system has no unnamed files.
  static DirectFile create_unnamed(const std::string& directory, std::uint64_t size_bytes);
  // Gives the file a name that is still free. The folder is not synced.
  // Fails with: kInput where the name is taken; kIo.
  void link_as(const std::string& path);
  // Opens an existing file. Fails with: kInput (missing, not a regular file, not writable).
  static DirectFile open_existing(const std::string& path);

  // Returns another owner of the same open file. `name`: for messages.
  // Fails with: kIo (no descriptor left).
  DirectFile shared_as(const std::string& name) const;

  int descriptor() const { return descriptor_.get(); }
  std::uint64_t size_bytes() const { return size_bytes_; }
  // Offset, length and memory address must be multiples of this. Asked from statx(STATX_DIOALIGN);
  // 4096 where the kernel does not tell, and at least 512.
  std::uint64_t alignment_bytes() const { return alignment_bytes_; }
  // False where the file system refused O_DIRECT and the page cache is used instead.
  bool is_direct() const { return is_direct_; }
  // Its path, or "DIRECTORY/(scratch)": for messages.
  const std::string& name() const { return name_; }

 private:
  void go_direct();

  UniqueFd descriptor_;
  std::uint64_t size_bytes_ = 0;
  std::uint64_t alignment_bytes_ = 512;
  bool is_direct_ = false;
  std::string name_;
};

}  // namespace sluice
