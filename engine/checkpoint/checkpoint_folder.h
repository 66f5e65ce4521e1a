// Checkpoints in a folder, each a folder of its own: "step-000000012", or "step-000000012.1" where
// that step was saved before. One appears whole or not at all: it is written under a name that
// begins with a dot, its files and itself are synced, and a rename, synced too, gives it its name.
// "latest" is a link that is replaced in the same way. What is older goes only after that.
//
// Thread rule: plain functions of one thread; of several ranks, rank 0's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"

namespace sluice {

struct CheckpointName {
  std::uint64_t step = 0;
  std::uint32_t revision = 0;  // of several that were saved at this step

  std::string text() const;
  auto operator<=>(const CheckpointName&) const = default;
};

// Newest first; none where there is no folder. Whether they can be read is another question.
// Fails with: kInput where `root` cannot be listed.
std::vector<CheckpointName> list_checkpoints(const std::string& root);

// One process at a time writes checkpoints to a folder. Ends with the object, or the process.
class CheckpointLock {
 public:
  // Makes the folder where it is missing, and removes what a killed process left half written.
  // Fails with: kInput where another process has it, by host and number, or it cannot be made.
  explicit CheckpointLock(const std::string& root);
  // Folders that were removed: of checkpoints that never had become whole.
  const std::vector<std::string>& removed() const { return removed_; }

 private:
  UniqueFd file_;
  std::vector<std::string> removed_;
};

// A checkpoint that is being written. Without commit() it goes with the object.
class NewCheckpoint {
 public:
  // Makes `root` where it is missing.
  // Fails with: kInput, kNoSpace, kIo, as all below.
  explicit NewCheckpoint(const std::string& root);
  NewCheckpoint(const NewCheckpoint&) = delete;
  NewCheckpoint& operator=(const NewCheckpoint&) = delete;
  ~NewCheckpoint();

  const std::string& folder() const { return folder_; }
  // A file that begins with `beginning` and has room for `size_bytes`: a full disk shows here.
  void create(const std::string& name, std::string_view beginning, std::uint64_t size_bytes) const;
  // A whole file, synced.
  void write(const std::string& name, std::string_view text) const;
  // Gives it its name and removes all but the `keep` newest of those that are no newer; 0 = none.
  // Every file in it has been synced. Returns the path.
  std::string commit(std::uint64_t step, std::uint32_t keep);

 private:
  std::string root_;
  std::string folder_;  // empty once it has its name
};

// A part of a file of a checkpoint that is being written, by any rank.
class CheckpointFile {
 public:
  // Fails with: kInput where it is missing: `folder` is then no folder that all ranks share.
  CheckpointFile(const std::string& folder, const std::string& name);
  // Fails with: kNoSpace, kIo.
  void write(std::uint64_t offset_bytes, std::span<const std::byte> bytes);
  // Fails with: kIo.
  void sync();

 private:
  std::string path_;
  UniqueFd file_;
};

}  // namespace sluice
