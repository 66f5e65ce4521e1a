// A durable store that an engine opens or makes together with the engines of all other ranks. The
// object holds the lock on every storage path, the files, and the commit from which every rank
// continues (docs/storage-format.md). The class in engine/flow/commits.h makes later commits.
//
// Thread rule: the application's thread. With several ranks, all ranks call each function at the
// same point. If a function fails on one rank, the function fails on all ranks.
// Invariant: if a new store is given up before name_data(), only its lock files are left. An old
// store stays unchanged until all checks have passed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/durable/extra_copies.h"
#include "engine/flow/commits.h"
#include "engine/ranks/ranks.h"
#include "engine/store/commit_choice.h"
#include "engine/store/durable_identity.h"
#include "engine/store/store_files.h"
#include "engine/store/tiers.h"

namespace sluice {

class DurableStore {
 public:
  // If an old store has more copies than `placement`, the constructor sets the number of copies in
  // `placement` to the number in the store. If an old store has fewer copies than `placement`, the
  // store's data files get room for the missing copies, until the store ends without a commit that
  // names them. All arguments must outlive the store.
  // Fails with:
  // - kInput: a process of another job has the store or one of its files, a path lacks the store's
  //   files, or the store's model, layout or number of ranks differs.
  // - kTimeout: transfers of a process that has ended are still under way after storage.timeout.
  // - kDamaged, kNoSpace and others: a file cannot be read or made.
  DurableStore(const Config& config, const ModelSpec& model, const Layout& layout,
               Placement& placement, Ranks& ranks);

  // Returns whether the store had no commit. If the store had no commit, the application still has
  // to provide the state.
  bool is_new() const { return start_.record.planes.empty(); }
  // The record of the commit from which the run continues. Requires: not is_new().
  const CommitRecord& record() const { return start_.record; }
  // Returns the files and the places that Tiers needs. The function is called only once.
  DurableHomes take_homes() { return std::move(homes_); }
  const CommitStart& start() const { return start_; }
  // Lines of text for the user.
  const std::vector<std::string>& notes() const { return notes_; }
  // This function must be called before another state replaces the store's state. `step` is the
  // step of the other state. Fails with kInput if there are several ranks and this rank has a
  // commit of that step. A crash may occur between the commits of the ranks. When ranks open a
  // store, they compare only their step numbers. Without the check in this function, the ranks
  // could continue from different states.
  void require_other_step(std::uint64_t step) const;

  // Returns the config's numbers that differ from the numbers in the last commit.
  std::vector<std::string> changes() const { return identity_.changes(record().settings); }
  // Returns the settings for the next records. These settings include changes().
  std::string accepted_settings() const {
    return identity_.settings(identity_.accepted_changes(record().settings, record().step));
  }
  std::uint64_t config_hash() const { return identity_.config_hash(); }

  // In a new store, name_data() gives the data files their names. When the first commit is durable,
  // name_records() gives the record files their names. The store exists as soon as name_records()
  // has returned.
  void name_data();
  void name_records();
  const std::string& name() const { return name_; }

 private:
  void lock();
  StoreFinding find();
  StoreFinding share_finding(const StoreFinding& own);
  void make(const Placement& placement);
  void open(Placement& placement);
  void take_planes(const CommitRecord& record, Placement& placement);
  void add_missing_copies(const Placement& placement);
  void set_marks(StoreStage stage);
  void mend_marks();
  StoreFiles::Options options() const;
  std::uint64_t agree_on_step(const CommitOffer& own);
  void check(const CommitRecord& record, const std::string& file) const;
  std::string find_whereabouts() const;

  const Config& config_;
  const Layout& layout_;
  Ranks& ranks_;
  const std::string name_;
  const DurableIdentity identity_;
  StoreId id_{};
  FileLocks file_locks_;
  std::vector<StoreLock> locks_;  // by path
  std::vector<StorePath> paths_;
  std::string whereabouts_;
  std::optional<StoreFiles> files_;
  std::optional<ExtraCopies> extra_copies_;
  CommitFiles commit_files_;
  DurableHomes homes_;
  CommitStart start_;
  CommitOffer offer_;  // of the opened store
  std::vector<std::string> notes_;
};

}  // namespace sluice
