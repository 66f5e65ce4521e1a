// A file for O_DIRECT transfers. The full size of the file is allocated when the file is made. A
// scratch file has no name, so the kernel frees its space even if the process crashes. A forked
// child has no copy of the descriptor. A file made by create_unnamed() can get a name later. A
// DirectFile can be moved, and has one owner. Any thread may use the descriptor.
#pragma once

#include <cstdint>
#include <string>

#include "base/process_fd.h"

namespace sluice {

// Returns the number of free bytes that an unprivileged user may take in the file system of
// `directory`.
// Fails with kInput if `directory` is missing or not accessible.
std::uint64_t free_bytes(const std::string& directory);

enum class FileAccess : std::uint8_t { kReadAndWrite, kRead };

class DirectFile {
 public:
  // Creates an unnamed file of `size_bytes` (rounded up to whole pages) in `directory`, with mode
  // 0600. The call uses O_TMPFILE. If the file system lacks O_TMPFILE, the call creates a named
  // file and removes the name immediately. The call allocates the space, so later writes cannot
  // fail with ENOSPC.
  // Fails with:
  // - kInput: `directory` is missing, is not a directory, is not writable, or is on a file system
  //   that cannot preallocate.
  // - kNoSpace: there is too little space. The message gives the needed and the free bytes.
  // - kUnsupported: no descriptor is left.
  // - kIo: the drive reports an error.
  static DirectFile create_scratch(const std::string& directory, std::uint64_t size_bytes);

  // Creates a file as create_scratch() does, but link_as() can give this file a name. If the file
  // system has a flag against copy-on-write, the call sets this flag for the file. Fails with the
  // errors of create_scratch(), and with kUnsupported if the file system has no unnamed files.
  static DirectFile create_unnamed(const std::string& directory, std::uint64_t size_bytes);
  // Gives the file the name `path`. No other file may have this name. The call does not sync the
  // folder.
  // Fails with kInput if the name is taken, with kNoSpace or kUnsupported if space or memory is
  // missing, and with kIo if the file system reports another error.
  void link_as(const std::string& path);
  // Opens an existing file.
  // Fails with kInput if the file is missing, is not a regular file, or does not allow `access`.
  // Also fails with kUnsupported if no descriptor is left, and with kIo if the drive reports an
  // error.
  static DirectFile open_existing(const std::string& path,
                                  FileAccess access = FileAccess::kReadAndWrite);
  // Makes the file at least `size_bytes` long, rounded up to whole pages. The call allocates the
  // space as create_scratch() does, and keeps the file's contents. Requires: the size of the file
  // is a whole number of pages.
  // Fails with the errors of create_scratch(). After a failure, the file has its former size.
  void extend(std::uint64_t size_bytes);
  // Undoes extend() by shortening the file to `size_bytes`.
  void cut(std::uint64_t size_bytes) noexcept;

  // Returns a second owner of the same open file. `name` is the name of the second owner in
  // messages. Fails with kUnsupported if no descriptor is left, and with kIo if the kernel reports
  // another error.
  DirectFile shared_as(const std::string& name) const;

  int descriptor() const { return descriptor_.get(); }
  std::uint64_t size_bytes() const { return size_bytes_; }
  // The offset, the length and the memory address of a transfer must be multiples of the result.
  // The result comes from statx(STATX_DIOALIGN). If the kernel reports no number, the result is
  // 4096. The result is at least 512.
  std::uint64_t alignment_bytes() const { return alignment_bytes_; }
  // Returns false if the file system refused O_DIRECT. In that case, all reads and writes go
  // through the page cache.
  bool is_direct() const { return is_direct_; }
  // The name of the file in messages: the file's path, or "DIRECTORY/(scratch)".
  const std::string& name() const { return name_; }

 private:
  void go_direct();

  ProcessFd descriptor_;
  std::uint64_t size_bytes_ = 0;
  std::uint64_t alignment_bytes_ = 512;
  bool is_direct_ = false;
  std::string name_;
};

}  // namespace sluice
