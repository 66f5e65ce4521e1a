// Reads the files of a durable store without an engine, for `sluice state`. Only remove_store()
// changes anything.
//
// Thread rule: any thread; the functions wait for storage.
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
  CommitOffer offer = {};
  std::string problem = {};  // why its records cannot be read; the rest is empty then
};

struct StoreSurvey {
  std::string name;
  std::vector<std::string> directories;
  StoreId id{};
  StorePresence presence = StorePresence::kNone;
  std::uint64_t file_bytes = 0;            // of all its files
  std::vector<SurveyedRank> ranks = {};    // those with record files here
  std::optional<std::uint64_t> step = {};  // that all ranks can continue from
  std::string holder = {};                 // the job that has it, if any
};

// The names of the stores that have a lock file in one of the directories.
std::vector<std::string> store_names(std::span<const std::string> directories);

// Fails with kInput or kDamaged, as find_store() does.
StoreSurvey survey_store(const std::string& name, const std::vector<std::string>& directories);

// Reads all data that the newest commit of a rank names, and compares the data with the checksums.
// Returns a line for each plane that differs or cannot be read.
// Fails with kInput if files are missing.
std::vector<std::string> find_damaged_planes(const StoreSurvey& store, const SurveyedRank& rank);

// Reads the copy that a record names for a plane. Returns the damage found, or an empty text.
// Requires: `buffer` has room for the copy.
std::string read_plane(IoQueue& queue, const StoreFiles& files, const CommitPlane& plane,
                       std::span<std::byte> buffer);

// Removes the store's files. The lock files stay. The lock files then say that no store was made.
// Returns the number of freed bytes.
// Fails with kInput if a job has the store's lock.
std::uint64_t remove_store(const StoreSurvey& store);

}  // namespace sluice
