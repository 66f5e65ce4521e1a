// The lock file of a store on one storage path, NAME.lock: two jobs meet there before either has
// written a byte, and the second one learns who the first is. It is never unlinked, and carries the
// mark of the store's creation: whose files may lie on the path, and whether all of them were made.
//
// Thread rule: one thread at a time.
// Invariants: the lock belongs to this process alone: a forked child releases it at once, so that
// it ends with the process, however that ends. The text is one sector, written whole and flushed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/unique_fd.h"
#include "engine/store/commit_record.h"

namespace sluice {

enum class StoreStage : std::uint8_t { kNone, kCreating, kMade };

// A path's knowledge of its store.
struct StoreMark {
  StoreStage stage = StoreStage::kNone;
  StoreId id{};
  bool operator==(const StoreMark&) const = default;
};

class StoreLock {
 public:
  // Takes the lock, and makes its file where there is none. `job`: the random text of a job whose
  // processes may share the lock; if another of them has it, this one counts as having it, too.
  // Fails with: kInput naming host, process and start of the holder, or an unusable path; kDamaged
  // where the file is not a store's.
  StoreLock(const std::string& directory, const std::string& name, const std::string& job);
  ~StoreLock();
  StoreLock(StoreLock&& other) noexcept;
  StoreLock& operator=(StoreLock&& other) = delete;

  const StoreMark& mark() const { return mark_; }
  // Durable on return. Requires: this process has the lock itself.
  void set_mark(const StoreMark& mark);
  bool is_own() const { return static_cast<bool>(descriptor_); }

 private:
  void write_text();

  std::string path_;
  std::string job_;
  UniqueFd descriptor_;
  StoreMark mark_;
};

// Reads a path's lock file without taking it; empty: there is no such file.
// Fails with: kDamaged, kInput.
std::optional<StoreMark> read_store_mark(const std::string& directory, const std::string& name);

// The holder of the path's lock, in words, as far as this host can tell; empty: there is none.
// Takes no lock, so it is in no one's way.
std::optional<std::string> store_holder(const std::string& directory, const std::string& name);

}  // namespace sluice
