// The files of a durable store: what they are called, how they come to be there, and whether all of
// them are. Of a store NAME with a random id, each storage path has NAME.lock (store_lock.h) and,
// for each rank, NAME.ID.rRANK.dataK; two paths, or one, have NAME.ID.rRANK.commit0 and .commit1.
//
// Files are made without a name, and get theirs in this order: every path's mark says "creating
// ID"; data files, folders synced; record files, folders synced; every mark says "made ID". So a
// store whose creation was cut short can be told from one that has lost a path.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/store/commit_writer.h"
#include "engine/store/store_lock.h"
#include "io/direct_file.h"

namespace sluice {

// One of the store's storage paths, as it is found.
struct StorePath {
  std::string directory;
  std::optional<StoreMark> mark;  // none: no lock file
  struct File {
    std::string name;
    StoreId id;
  };
  std::vector<File> files;  // named as the store's; the lock file is none of them
};
// Fails with: kInput for a path that cannot be read; kDamaged.
StorePath look_at_path(const std::string& directory, const std::string& name);

enum class StorePresence : std::uint8_t {
  kNone,       // nothing of that name was ever made
  kAbandoned,  // its creation was cut short on all paths: the files of `id` are of no use
  kMade,
};
struct StoreFinding {
  StorePresence presence = StorePresence::kNone;
  StoreId id{};
};
// Fails with: kInput, naming the path, where a store is there, but not on all paths.
StoreFinding find_store(const std::string& name, std::span<const StorePath> paths);

StoreId random_store_id();
// Unlinks the files with that id. Requires: the paths' locks.
void remove_store_files(std::span<const StorePath> paths, const StoreId& id);

class StoreFiles {
 public:
  struct Options {
    std::vector<std::string> directories;
    std::string name;
    StoreId id{};
    std::uint32_t rank = 0;
  };

  // Makes the rank's files, still without names: a data file of data_bytes[i] in directory i.
  // Fails with: kNoSpace and others, nothing left behind.
  static StoreFiles create(const Options& options, std::span<const std::uint64_t> data_bytes,
                           std::uint64_t slot_bytes);
  // Requires: create(). The folders are synced on return.
  void name_data();
  void name_records();

  // Opens the record files, whichever of the directories each lies in; the records say how many
  // data files there are, for open_data().
  // Fails with: kInput, naming those that are missing and where they were looked for; kDamaged.
  static StoreFiles open_records(const Options& options);
  void open_data(std::uint32_t count);

  std::span<const DirectFile> data() const { return data_; }
  // Of each data file, in which of the directories it lies.
  std::span<const std::uint32_t> data_paths() const { return data_paths_; }
  // The data files, to be used, under the names that they have or will get.
  std::vector<DirectFile> shared_data() const;
  // As the commits' code wants them; the descriptors are this object's.
  CommitFiles commit_files() const;

 private:
  explicit StoreFiles(Options options) : options_(std::move(options)) {}
  std::string file_name(const char* kind, std::size_t index) const;
  void sync_folders() const;
  void find(const char* kind, std::uint32_t count, std::vector<DirectFile>& files,
            std::vector<std::uint32_t>& paths) const;

  Options options_;
  std::vector<DirectFile> data_;
  std::vector<DirectFile> records_;
  std::vector<std::uint32_t> data_paths_;  // in which of the directories each lies
  std::vector<std::uint32_t> record_paths_;
};

}  // namespace sluice
