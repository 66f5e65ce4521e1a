// The files of a durable store: their names, their creation, and the check that none is missing. A
// store with the name NAME has a random id. Each storage path has NAME.lock (store_lock.h) and, for
// each rank, NAME.ID.rRANK.dataK. The record files NAME.ID.rRANK.commit0 and .commit1 lie on two
// paths, or on the only path.
//
// Files are made without a name. Then every path's mark says "creating ID". The data files get
// names, and the folders are synced. The record files get names, and the folders are synced again.
// At the end, every mark says "made ID". So a store whose creation was interrupted differs from a
// store that has lost a path.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/store/commit_writer.h"
#include "engine/store/store_lock.h"
#include "io/direct_file.h"

namespace sluice {

// The content found on one of the store's storage paths.
struct StorePath {
  std::string directory;
  std::optional<StoreMark> mark;  // empty: no lock file
  struct File {
    std::string name;
    StoreId id;
  };
  std::vector<File> files;  // the store's, without the lock file
};
// Fails with kInput if a path cannot be read, and with kDamaged.
StorePath look_at_path(const std::string& directory, const std::string& name);

enum class StorePresence : std::uint8_t {
  kNone,       // nothing of that name was ever made
  kAbandoned,  // its creation was interrupted on all paths, so the files of `id` are useless
  kMade,
};
struct StoreFinding {
  StorePresence presence = StorePresence::kNone;
  StoreId id{};
};
// Fails with kInput if a store exists, but not on all paths. The message names the path.
StoreFinding find_store(const std::string& name, std::span<const StorePath> paths);

// Returns the ranks that have records on the paths.
std::set<std::uint32_t> ranks_on(std::span<const StorePath> paths);

StoreId random_store_id();
// Unlinks the files whose names have `id`. Requires: the paths' locks.
void remove_store_files(std::span<const StorePath> paths, const StoreId& id);

class StoreFiles {
 public:
  struct Options {
    std::vector<std::string> directories;
    std::string name;
    StoreId id{};
    std::uint32_t rank = 0;
    std::string whereabouts = {};  // which hosts have the files of which ranks, for messages
  };

  // Makes the rank's files without names. Directory i gets a data file of data_bytes[i].
  // Fails with kNoSpace and others. After a failure, nothing is left behind.
  static StoreFiles create(const Options& options, std::span<const std::uint64_t> data_bytes,
                           std::uint64_t slot_bytes);
  // Requires: create(). The folders are synced on return.
  void name_data();
  void name_records();

  // Searches all directories for the record files, and opens these files. The records say how many
  // data files open_data() has to open.
  // Fails with kInput, naming the missing files and the directories searched, and with kDamaged.
  static StoreFiles open_records(const Options& options);
  void open_data(std::uint32_t count);
  // Gives each data file at least the given number of bytes. Requires: open_data().
  // Fails with: kNoSpace and others; every file then has its former size.
  void extend_data(std::span<const std::uint64_t> data_bytes);
  // Takes back what extend_data() has added.
  void cut_data() noexcept;

  std::span<const DirectFile> data() const { return data_; }
  // The directory of each data file, as an index.
  std::span<const std::uint32_t> data_paths() const { return data_paths_; }
  // The data files with the names that they have or will get.
  std::vector<DirectFile> shared_data() const;
  // The open files, for the code that writes commits. This object owns the descriptors.
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
  std::vector<std::uint32_t> data_paths_;  // the directory of each, as an index
  std::vector<std::uint32_t> record_paths_;
  std::vector<std::uint64_t> former_bytes_;  // of each data file before extend_data()
};

}  // namespace sluice
