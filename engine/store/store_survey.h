// The functions read the files of a durable store without an engine, for `sluice state`. Only
// remove_store() changes files.
//
// Thread rule: any thread may call the functions. The functions block until storage has answered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/store/commit_choice.h"
#include "engine/store/store_files.h"
#include "io/io_queue.h"

namespace sluice {

struct SurveyedRank {
  std::uint32_t rank = 0;
  CommitRecord newest = {};
  std::optional<CommitRecord> older = {};  // the previous commit, if it still exists
  CommitOffer offer = {};
  std::string problem = {};       // why the records cannot be read; if set, the rest is empty
  bool is_damaged = false;        // the records' bytes are the problem, and not the way to them
  std::string data_problem = {};  // why the data files of the newest commit cannot be opened

  // The rank's commit of `step`. If the rank has no commit of `step`, the result is the newest
  // commit.
  const CommitRecord& of_step(std::optional<std::uint64_t> step) const {
    return older && step == older->step && step != newest.step ? *older : newest;
  }
};

struct StoreSurvey {
  std::string name;
  std::vector<std::string> directories;
  StoreId id{};
  StorePresence presence = StorePresence::kNone;
  std::uint64_t file_bytes = 0;            // of all files of the store
  std::vector<SurveyedRank> ranks = {};    // ranks with record files here
  std::optional<std::uint64_t> step = {};  // the step from which all ranks can continue
  std::string holder = {};  // the job that has the store's lock, or the process that has its files
  std::vector<std::string> lost_marks = {};  // StoreFinding::lost_marks
};

// The names of the stores that have a lock file or a record file in one of the directories.
std::vector<std::string> store_names(std::span<const std::string> directories);

// Fails with the errors of look_at_path() and find_store().
StoreSurvey survey_store(const std::string& name, const std::vector<std::string>& directories);

// Describes the process that uses one of the store's files. The result is empty if there is no such
// process on this host. Only the first of a job's ranks on a host has the lock of a path, and the
// others may live on without it.
std::string store_user(std::span<const StorePath> paths);

// The ranks whose records are not in the store's directories on this host. These records may be on
// another host.
std::vector<std::uint32_t> absent_ranks(const StoreSurvey& store);
// Returns a line of text if every record can be read, but the ranks have no step in common.
// Otherwise the result is empty.
std::string find_disagreement(const StoreSurvey& store);

// Reads all data that a commit of `rank` names, and compares the data with the commit's checksums.
// The function uses the commit of StoreSurvey::step, because a run would continue from this commit.
// If the survey has no step, the function uses the newest commit. Returns a line for each plane
// that cannot be read, or that does not match its checksum.
// Fails with kInput if files are missing.
std::vector<std::string> find_damaged_planes(const StoreSurvey& store, const SurveyedRank& rank);

// Reads the copy that a record names for `plane`. Returns a text that describes the damage. The
// result is empty if there is no damage.
// Requires: `buffer` has room for the copy.
std::string read_plane(IoQueue& queue, const StoreFiles& files, const CommitPlane& plane,
                       std::span<std::byte> buffer);

struct RemovedStore {
  StoreId id{};
  std::uint64_t file_bytes = 0;  // of the removed files
};

// Removes the store's files from the directories, even if parts of the store are missing. The lock
// files are kept. Afterwards, the lock files say that there is no store.
// Fails with kInput if there is no store, if the directories have files of several stores, or if a
// job has the store's lock.
RemovedStore remove_store(const std::string& name, const std::vector<std::string>& directories);

}  // namespace sluice
