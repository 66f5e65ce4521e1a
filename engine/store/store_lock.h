// On a storage path, the lock file of a store has the name NAME.lock. Every job takes the lock
// before it writes to the store. So a second job learns which job has the lock. The lock file is
// never unlinked. The lock file also holds a mark. The mark contains the store's id, and says
// whether all files of the store have been made.
//
// Thread rule: one thread at a time.
// Invariants: one process holds the lock. When the process ends, the lock always ends, too. For
// this reason, a forked child closes its copy of the lock file immediately. The text of the file is
// exactly one sector long. The sector is written in one piece and flushed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/process_fd.h"
#include "engine/store/commit_record.h"

namespace sluice {

// Returns the name of this host, for messages.
std::string host_name();

enum class StoreStage : std::uint8_t { kNone, kCreating, kMade };

// This mark is in the lock file on one of the store's paths.
struct StoreMark {
  StoreStage stage = StoreStage::kNone;
  StoreId id{};
  bool operator==(const StoreMark&) const = default;
};

class StoreLock {
 public:
  // Takes the lock, and makes the lock file if there is none. Processes of one job may share the
  // lock. `job` is a random text that identifies the job. If another process of the same job has
  // the lock, this process becomes a holder, too.
  // Fails with:
  // - kInput: a process of another job has the lock, or the path cannot be used. The message names
  //   the other process by its host, its number and the time when it took the lock.
  // - kNoSpace, kIo or kUnsupported: the file cannot be read or written.
  // - kDamaged: the file is not the lock file of a store, or is damaged. A damaged file beside
  //   files of the store is accepted: its mark is lost, as that of a file which was removed.
  // - kUnsupported: another version of Sluice has written the file.
  StoreLock(const std::string& directory, const std::string& name, const std::string& job);
  ~StoreLock();
  StoreLock(StoreLock&& other) noexcept;
  StoreLock& operator=(StoreLock&& other) = delete;

  const StoreMark& mark() const { return mark_; }
  // Writes `mark` to the lock file. When the call returns, the mark is durable.
  // Requires: is_own().
  void set_mark(const StoreMark& mark);
  bool is_own() const { return static_cast<bool>(descriptor_); }

 private:
  void write_text();

  std::string path_;
  std::string job_;
  ProcessFd descriptor_;
  StoreMark mark_;
};

// Reads the mark in a path's lock file, without taking the lock. The result is empty if there is no
// such file.
// Fails with kDamaged or kInput if the file cannot be read.
std::optional<StoreMark> read_store_mark(const std::string& directory, const std::string& name);

// Describes the process that holds the path's lock. The result is empty if no such process is known
// on this host. The call does not take the lock, and so never hinders another process.
std::optional<std::string> store_holder(const std::string& directory, const std::string& name);

}  // namespace sluice
