// Checkpoints in a folder. Each checkpoint has its own folder: "step-000000012", or
// "step-000000012.1" if this step was saved before. A checkpoint appears whole or not at all. The
// checkpoint is first written under a name that begins with a dot, and its files and its folder are
// synced. Then the folder is renamed to the checkpoint's name, and the rename is synced, too. The
// link "latest" is replaced in the same way. Older checkpoints are removed only after the new
// checkpoint has its name.
//
// Thread rule: one thread calls the functions. With several ranks, this thread belongs to rank 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/process_fd.h"
#include "engine/checkpoint/checkpoint_kin.h"

namespace sluice {

struct CheckpointName {
  std::uint64_t step = 0;
  std::uint32_t revision = 0;  // the number of earlier checkpoints of this step

  std::string text() const;
  auto operator<=>(const CheckpointName&) const = default;
};

// Parses the name of a checkpoint. The result is empty if `text` is not the name of a checkpoint.
std::optional<CheckpointName> checkpoint_name_from(std::string_view text);

// Returns the names of the checkpoints in `root`, newest first. The list is empty if `root` does
// not exist. The function does not check whether the checkpoints can be read.
// Fails with kInput if `root` cannot be listed.
std::vector<CheckpointName> list_checkpoints(const std::string& root);

// With this lock, only one process at a time can write checkpoints to a folder. Several objects of
// a process share the lock of a folder. The lock ends with the last of them or with the process.
class CheckpointLock {
 public:
  // Makes the folder if it is missing. At the end of the lock, a folder and a lock file that the
  // constructor has made are removed if the folder holds nothing else. If this process did not have
  // the lock before, the constructor removes half-written checkpoints of a killed process. On a
  // file system without locks, it only adds a note, and removes nothing.
  // Fails with kInput if another process has the lock or if the folder cannot be made. The message
  // names the other process by host and number.
  explicit CheckpointLock(const std::string& root);
  CheckpointLock(const CheckpointLock&) = delete;
  CheckpointLock& operator=(const CheckpointLock&) = delete;
  ~CheckpointLock();
  // Lines of text for the user: what the constructor has removed, and what it could not do.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  struct Held;
  struct Table;
  static Table& table();
  bool try_to_lock(const std::string& root, bool is_last);
  bool take(const std::string& root, const std::string& path, int file);

  std::shared_ptr<Held> held_;
  std::vector<std::string> notes_;
};

// A checkpoint that is being written, under the folder's lock. If commit() was not called, the
// destructor removes the checkpoint.
class NewCheckpoint {
 public:
  // Makes `root` if it is missing.
  // Fails with kInput if the folder cannot be used or is locked, with kNoSpace if the disk is full,
  // and with kIo if the drive reports an error. The functions below fail with the same errors as
  // the constructor.
  explicit NewCheckpoint(const std::string& root);
  NewCheckpoint(const NewCheckpoint&) = delete;
  NewCheckpoint& operator=(const NewCheckpoint&) = delete;
  ~NewCheckpoint();

  const std::string& folder() const { return folder_; }
  // Makes a file of `size_bytes` bytes that begins with `beginning`. The call reserves the space
  // for the file. If the disk is full, this call fails. So a later write to the file does not fail
  // because of a full disk.
  void create(const std::string& name, std::string_view beginning, std::uint64_t size_bytes) const;
  // Writes a whole file and syncs it.
  void write(const std::string& name, std::string_view text) const;
  // Gives the checkpoint its name, and returns the path. The caller has already synced every file
  // in the checkpoint. The call removes a checkpoint of the same state, and then the oldest
  // checkpoints of this model until at most `keep` checkpoints of steps up to `step` are left.
  // Checkpoints of later steps are kept, and so are those that are damaged or of another model. If
  // `keep` is 0, the call keeps the checkpoints of all steps. `kin_of` is called with the paths of
  // older checkpoints. Once the checkpoint has its name, nothing fails any more: a link that cannot
  // be replaced, an old checkpoint that cannot be removed and one that is kept as another state are
  // notes.
  std::string commit(std::uint64_t step, std::uint32_t keep,
                     const std::function<CheckpointKin(const std::string& path)>& kin_of);
  // Lines of text for the user.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  void attempt(const std::function<void()>& action);
  void note_that_stays(const std::string& path, const char* what);

  std::string root_;
  CheckpointLock lock_;
  std::string folder_;  // empty after commit() has given the name
  std::vector<std::string> notes_;
};

// The class writes one file of a new checkpoint. Any rank and any thread may write parts of the
// file.
class CheckpointFile {
 public:
  // Fails with kInput if the file is missing or if the process may open no more files. The file is
  // missing if the ranks do not share `folder`.
  CheckpointFile(const std::string& folder, const std::string& name);
  // Whole pages are written without the page cache, if the file system allows such writes. If the
  // address of `bytes` is not a multiple of the page size, the call first copies the bytes to
  // `room`. No other thread uses `room`. `room` is aligned to a page, and is at least one page
  // long.
  // Fails with kNoSpace if the disk is full, and with kIo if the drive reports an error.
  void write(std::uint64_t offset_bytes, std::span<const std::byte> bytes,
             std::span<std::byte> room);
  // Fails with kIo if the drive reports an error.
  void sync();

 private:
  std::uint64_t write_pages(std::uint64_t offset_bytes, std::span<const std::byte> bytes,
                            std::span<std::byte> room);

  std::string path_;
  ProcessFd file_;
  ProcessFd direct_;  // none: the file system has no O_DIRECT
};

}  // namespace sluice
