// The lock file of a store on one storage path, NAME.lock. Every job takes the lock before it
// writes a byte. So a second job learns which job was first. The file is never unlinked. The file
// carries the mark of the store's creation. The mark says whose files may lie on the path, and
// whether all files were made.
//
// Thread rule: one thread at a time.
// Invariants: the lock belongs to this process alone. The lock always ends when the process ends.
// For this reason a forked child releases the lock immediately. The text is one sector, written
// whole and flushed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/unique_fd.h"
#include "engine/store/commit_record.h"

namespace sluice {

// Returns the name of this host, for messages.
std::string host_name();

enum class StoreStage : std::uint8_t { kNone, kCreating, kMade };

// The facts about a store that are known at one of its paths.
struct StoreMark {
  StoreStage stage = StoreStage::kNone;
  StoreId id{};
  bool operator==(const StoreMark&) const = default;
};

class StoreLock {
 public:
  // Takes the lock, and makes the lock file if there is none. `job` is the random text of a job
  // whose processes may share the lock. If another process of the same job has the lock, this
  // process counts as a holder, too.
  // Fails with:
  // - kInput: another process has the lock, or the path cannot be used. The message names the other
  //   process by host, number and start.
  // - kNoSpace, kIo or kUnsupported: the file cannot be read or written.
  // - kDamaged: the file is not a store's.
  // - kInvalidArgument: this process holds as many locks as it can.
  StoreLock(const std::string& directory, const std::string& name, const std::string& job);
  ~StoreLock();
  StoreLock(StoreLock&& other) noexcept;
  StoreLock& operator=(StoreLock&& other) = delete;

  const StoreMark& mark() const { return mark_; }
  // The mark is durable on return. Requires: this process has the lock itself.
  void set_mark(const StoreMark& mark);
  bool is_own() const { return static_cast<bool>(descriptor_); }

 private:
  void write_text();

  std::string path_;
  std::string job_;
  UniqueFd descriptor_;
  StoreMark mark_;
};

// Reads a path's lock file without taking the lock. The result is empty if there is no such file.
// Fails with kDamaged or kInput if the file cannot be read.
std::optional<StoreMark> read_store_mark(const std::string& directory, const std::string& name);

// Describes the process that has the path's lock, as far as this host knows it. The result is empty
// if the lock is free. The call takes no lock, so it hinders no other process.
std::optional<std::string> store_holder(const std::string& directory, const std::string& name);

}  // namespace sluice
