// A durable store that an engine opens or makes, together with all other ranks. The object holds
// the lock on every storage path, the files, and the commit from which every rank continues
// (docs/storage-format.md). The class in engine/flow/commits.h makes later commits.
//
// Thread rule: the application's thread. With several ranks, all ranks call each function at the
// same point. If a function fails on one rank, the function fails on all ranks.
// Invariant: before name_data(), a new store that is given up leaves behind only its lock files. An
// old store stays unchanged until all checks have passed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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
  // `placement` to the number in the store. If an old store has fewer copies, the data files of the
  // store get room for the missing copies. All arguments must outlive the store.
  // Fails with:
  // - kInput: another job has the store, a path lacks the store's files, or the store's model,
  //   layout or number of ranks differs.
  // - kDamaged, kNoSpace and others: a file cannot be read or made.
  DurableStore(const Config& config, const ModelSpec& model, const Layout& layout,
               Placement& placement, Ranks& ranks);

  // Returns whether the store had no commit. In this case, the application still has to give the
  // state.
  bool is_new() const { return start_.record.planes.empty(); }
  // The record of the commit from which the run continues. Requires: not is_new().
  const CommitRecord& record() const { return start_.record; }
  // Returns the files and places, for Tiers. The function is called only once.
  DurableHomes take_homes() { return std::move(homes_); }
  const CommitStart& start() const { return start_; }
  // Lines of text for the user.
  const std::vector<std::string>& notes() const { return notes_; }
  // Called before another state replaces the store's state. `step` is the step of the other state.
  // Fails with kInput if a record of this rank has another state of that step. The reason for this
  // check is a crash between the commits of the ranks. When ranks open a store, they compare only
  // the numbers of their steps. Without the check, the ranks could continue from different states.
  void require_other_step(std::uint64_t step) const;

  // The numbers of the config that differ from the numbers of the last commit.
  std::vector<std::string> changes() const { return identity_.changes(record().settings); }
  // The settings of the next records, which include changes().
  std::string accepted_settings() const {
    return identity_.settings(identity_.accepted_changes(record().settings, record().step));
  }
  std::uint64_t config_hash() const { return identity_.config_hash(); }

  // In a new store, name_data() gives the data files their names. When the first commit is durable,
  // name_records() gives the record files their names. From then on, the store exists.
  void name_data();
  void name_records();
  const std::string& name() const { return name_; }

 private:
  void lock();
  StoreFinding find();
  void make(const Placement& placement);
  void open(Placement& placement);
  void take_planes(const CommitRecord& record, Placement& placement);
  void add_missing_copies(const Placement& placement);
  void set_marks(StoreStage stage);
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
  std::vector<StoreLock> locks_;  // by path
  std::vector<StorePath> paths_;
  std::string whereabouts_;
  std::optional<StoreFiles> files_;
  CommitFiles commit_files_;
  DurableHomes homes_;
  CommitStart start_;
  CommitOffer offer_;  // of the opened store
  std::vector<std::string> notes_;
};

}  // namespace sluice
