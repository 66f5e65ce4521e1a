// A durable store as an engine opens or makes it, with all ranks: its lock on every storage path,
// its files, and the commit that every rank continues from (docs/storage-format.md). Later commits
// are made by engine/flow/commits.h.
//
// Thread rule: the application's thread. With several ranks, all call each function in the same
// place, and a failure on one is a failure on all.
// Invariant: until name_data(), a new store leaves behind only its lock files; an old one stays as
// it is until everything about it has been checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/store/durable_identity.h"
#include "engine/flow/commits.h"
#include "engine/ranks/ranks.h"
#include "engine/store/commit_choice.h"
#include "engine/store/store_files.h"
#include "engine/store/tiers.h"

namespace sluice {

class DurableStore {
 public:
  // `placement` gets as many copies as an old store has. All must outlive the store.
  // Fails with: kInput where another job has it, a path lacks its files, or its model, layout or
  // number of ranks differs; kDamaged, kNoSpace and others.
  DurableStore(const Config& config, const ModelSpec& model, const Layout& layout,
               Placement& placement, Ranks& ranks);

  // It had no commit, so the state still has to be given.
  bool is_new() const { return start_.record.planes.empty(); }
  // The record of the commit that it continues from. Requires: not is_new().
  const CommitRecord& record() const { return start_.record; }
  // The files and places, for Tiers. Once.
  DurableHomes take_homes() { return std::move(homes_); }
  const CommitStart& start() const { return start_; }
  // Lines for the user.
  const std::vector<std::string>& notes() const { return notes_; }

  // The numbers of the config that differ from those of the last commit.
  std::vector<std::string> changes() const { return identity_.changes(record().settings); }
  // The settings of the next records, with those changes.
  std::string accepted_settings() const {
    return identity_.settings(identity_.accepted_changes(record().settings, record().step));
  }
  std::uint64_t config_hash() const { return identity_.config_hash(); }

  // For a new store: the data files get their names; then, when the first commit is durable, the
  // record files get theirs, and the store exists.
  void name_data();
  void name_records();
  const std::string& name() const { return name_; }

 private:
  void lock();
  StoreFinding find();
  void make(const Placement& placement);
  void open(Placement& placement);
  void take_planes(const CommitRecord& record, Placement& placement);
  void set_marks(StoreStage stage);
  StoreFiles::Options options() const;
  std::uint64_t agree_on_step(const CommitOffer& own);
  void check(const CommitRecord& record) const;

  const Config& config_;
  const Layout& layout_;
  Ranks& ranks_;
  const std::string name_;
  const DurableIdentity identity_;
  StoreId id_{};
  std::vector<StoreLock> locks_;  // by path
  std::vector<StorePath> paths_;
  std::optional<StoreFiles> files_;
  CommitFiles commit_files_;
  DurableHomes homes_;
  CommitStart start_;
  std::vector<std::string> notes_;
};

}  // namespace sluice
