// The functions give the files of a durable store their names, create these files, and check that
// no file is missing. A store named NAME has a random id. Each storage path contains the lock file
// NAME.lock (store_lock.h). Each path also contains one data file NAME.ID.rRANK.dataK for each
// rank. The record files NAME.ID.rRANK.commit0 and .commit1 lie on two different paths. If there is
// only one path, both record files lie on it.
//
// First, the files are made without names. Then the mark in every path's lock file becomes
// "creating ID". Next, the data files get their names, and the folders are synced. Then the record
// files get their names, and the folders are synced again. At the end, the mark in every path's
// lock file becomes "made ID". So the marks distinguish a store with an unfinished creation from a
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
#include "engine/store/file_locks.h"
#include "engine/store/store_lock.h"
#include "io/direct_file.h"

namespace sluice {

// The files of a store that were found on one storage path.
struct StorePath {
  std::string directory;
  std::optional<StoreMark> mark;  // empty: no lock file, or a damaged one beside files of the store
  struct File {
    std::string name;
    StoreId id;
  };
  std::vector<File> files;  // the store's, without the lock file
};
// Fails with kInput if the path cannot be read. Fails with kDamaged if the lock file is damaged and
// the path has no files of the store: such a file may belong to another program.
StorePath look_at_path(const std::string& directory, const std::string& name);

enum class StorePresence : std::uint8_t {
  kNone,       // no store of this name was ever made
  kAbandoned,  // its creation was interrupted on all paths, so the files of `id` are useless
  kMade,
};
struct StoreFinding {
  StorePresence presence = StorePresence::kNone;
  StoreId id{};
  // The directories that have the files of a store, but have lost the mark "made".
  std::vector<std::string> lost_marks = {};
};
// If paths have files, but have lost their marks, the store is made if another path's mark says so.
// The store is also made if no mark is left on any path, and rank 0 has a commit: the record files
// of rank 0 get their names at the end of the creation.
// Fails with kInput if some paths have the store, but other paths do not. The message names the
// path.
StoreFinding find_store(const std::string& name, std::span<const StorePath> paths);

// Returns the name of the store to which a file belongs. The result is empty if the file is not the
// first record file of a rank.
std::optional<std::string> store_of_record(const std::string& file);

// Returns the ranks that have record files on the paths.
std::set<std::uint32_t> ranks_on(std::span<const StorePath> paths);

StoreId random_store_id();
// Waits until no process uses the files on the paths. Fails with the errors of FileLocks::lock().
// Requires: this process holds the locks of the paths, so that no other one comes meanwhile.
void await_users(std::span<const StorePath> paths, FileLocks& locks);
// Unlinks the files whose names contain `id`. `count` becomes the number of files that the call has
// removed, also if the call fails.
// Requires: this process holds the locks of the paths.
void remove_store_files(std::span<const StorePath> paths, const StoreId& id, std::size_t& count);
void remove_store_files(std::span<const StorePath> paths, const StoreId& id);

class StoreFiles {
 public:
  struct Options {
    std::vector<std::string> directories;
    std::string name;
    StoreId id{};
    std::uint32_t rank = 0;
    std::string whereabouts = {};  // for messages: which hosts have which ranks' files
    FileAccess access = FileAccess::kReadAndWrite;
  };

  // Makes the rank's files, which have no names yet. Directory i gets a data file of data_bytes[i]
  // bytes. The files are locked, as by lock(). Fails with the errors of
  // DirectFile::create_unnamed(). After a failure, no file is left behind.
  static StoreFiles create(const Options& options, std::span<const std::uint64_t> data_bytes,
                           std::uint64_t slot_bytes);
  // These functions give the data files and the record files their names.
  // Requires: create() has made the files. The folders are synced on return.
  void name_data();
  void name_records();

  // Searches all directories for the record files, and opens these files. The records say how many
  // data files open_data() has to open.
  // Fails with kInput if files are missing. The message names the missing files and the searched
  // directories.
  // Fails with kDamaged if a file is damaged.
  static StoreFiles open_records(const Options& options);
  void open_data(std::uint32_t count);
  // Locks the open files, before anything is read that decides what is written. The locks end when
  // all owners of the files have closed them, and all transfers have ended.
  // Fails with the errors of FileLocks::lock().
  void lock(FileLocks& locks) const;
  // Extends the data files. After the call, data file i has at least data_bytes[i] bytes.
  // Requires: open_data() has opened the files.
  // Fails with the errors of DirectFile::extend(). After a failure, every file has its former size.
  void extend_data(std::span<const std::uint64_t> data_bytes);
  // Shortens the data files to the sizes that they had before extend_data().
  void cut_data() noexcept;
  // The size of data file `file` before extend_data(). Requires: extend_data() has been called.
  std::uint64_t former_bytes(std::size_t file) const { return former_bytes_[file]; }

  std::span<const DirectFile> data() const { return data_; }
  // Element i is the index of the directory that contains data file i.
  std::span<const std::uint32_t> data_paths() const { return data_paths_; }
  // Returns copies of the objects in data(). The copies share the open files. Each copy has the
  // file's final name, even before the file itself gets this name.
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
  std::vector<std::uint32_t> data_paths_;  // by data file: index of its directory
  std::vector<std::uint32_t> record_paths_;
  std::vector<std::uint64_t> former_bytes_;  // of each data file before extend_data()
};

}  // namespace sluice
