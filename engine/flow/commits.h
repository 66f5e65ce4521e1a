// The commits of a durable store. This class decides when each commit begins, and when the commit
// becomes valid. The class also decides which writes of blocks have to wait for a commit. The
// commit of step v begins when every block is on storage at version v. The optimizer pass writes
// the blocks whose home is storage. The home saver writes the blocks whose home is memory. The
// commit itself, which flushes the data and writes a small record, runs during the next step.
// A commit contains a table of the copies that belong to the commit. Until the table of a commit is
// made, no block of a later version is written. If every copy of a block belongs to some commit,
// the next write of the block must wait. The write begins when the commit under way is valid.
//
// A flush makes read requests wait. So the commit of a step may be held back while the next step
// fetches its units (engine/plan/commit_turn.h).
//
// With several ranks, a commit is valid when it is durable on every rank. Before a rank votes on
// step v + 1, the rank waits for its own commit of step v. So the vote tells all ranks that the
// commit of step v is valid.
//
// Thread rule: scheduler's thread only.
// Invariants: commits begin in the order of their steps, one at a time. A commit records the
// application's text and the loss scale. The recorded values are the values at the end of the
// step's finish(). After a failure of the device, no commit begins, because an update or a copy on
// a failed device ends without an error. After any other failure, only a commit that was held back
// may begin, and only if its state was on storage before the failure.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/flow/flow_parts.h"
#include "engine/flow/home_saver.h"
#include "engine/store/commit_record.h"
#include "engine/store/commit_writer.h"

namespace sluice {

// The values with which a Commits object begins, after a store has been made or opened.
struct CommitStart {
  const CommitFiles* files = nullptr;
  CommitRecord record = {};  // the last record, or a record with only identity and settings
  std::uint32_t next_slot = 0;
  std::uint64_t next_generation = 1;
  std::uint32_t commit_every = 1;
  bool has_others = false;  // a commit is valid only when other ranks have it, too
};

class Commits {
 public:
  // All arguments must outlive the object. `on_change` runs whenever a commit has made progress.
  Commits(const CommitStart& start, const FlowParts& parts, std::function<void()> on_change);

  HomeSaver& saver() { return saver_; }

  // The optimizer pass calls the next functions, up to and including left().
  //
  // Returns whether the blocks that update number `step` has changed may be written to storage. The
  // result is true when the tables of all earlier commits have been made.
  bool may_store(std::uint64_t step) const;
  // Returns whether a commit is due after update number `step`.
  bool is_due(std::uint64_t step) const { return step % commit_every_ == 0; }
  // Called when update number `step` has changed the block, and nothing is using the block any
  // more.
  void updated(BlockId block, std::uint64_t step);
  // Called when step number `step` does not change the block, and nothing is using the block.
  void left(BlockId block, std::uint64_t step);

  // The data that a commit records about a finished step.
  struct StepEnd {
    std::uint64_t step = 0;
    CommittedScale scale = {};
    std::string application = {};
  };
  // Called when a step has finished. If a commit of this step is due, the commit begins as soon as
  // possible.
  void finished(StepEnd end);
  // Makes a commit of the last step now, even if no commit is due. Requires: the homes hold all of
  // the state, and no step is active. With several ranks, count_for_all() must have been called
  // before this call.
  void want_now();
  // Makes the first commit of the store. The commit contains the present state. The requirements
  // are the same as for want_now().
  void want_first(StepEnd end);
  // Called when all commits that this rank has made are durable on every rank.
  void count_for_all();

  // Holds back the commit of `step` while the current step fetches units. The number `uses` counts
  // the uses of units from the start of the current step. The commit of `step` is held back until
  // the units of the counted uses have been fetched. After a call of release() or a failure of the
  // engine, the commit is no longer held back. Commits that want_now() or want_first() has
  // requested are never held back. With several ranks, no commit is held back, because the vote on
  // the current step waits for the commit. No commit is held back if a flush takes long compared
  // with a step (commit_may_wait). Requires: the fetches for the counted uses do not wait for the
  // commit of `step`.
  void hold(std::uint64_t step, std::uint32_t uses);
  void release();

  struct Progress {
    // Says whether the results of update number `step` are on storage. The function considers only
    // the blocks whose home is storage.
    std::function<bool(std::uint64_t step)> is_stored;
    // Says whether the current step has fetched the unit of use number `use`.
    std::function<bool(std::uint32_t use)> has_unit;
  };
  // Starts all saves and commits that can start now.
  void pump(const Progress& progress);
  // After this call, no save and no commit begins.
  void stop();

  // Returns whether all due or requested commits are durable on this rank.
  bool is_durable() const { return wanted_.empty() && writer_.is_idle(); }
  // Returns whether no commit and no save is under way.
  bool is_at_rest() const { return writer_.is_idle() && saver_.is_at_rest(); }
  // The last step whose commit is durable on this rank. The result is empty if no commit is durable
  // yet.
  std::optional<std::uint64_t> durable_step() const { return durable_step_; }
  // The application's text in the commit of durable_step().
  const std::string& application() const { return durable_application_; }
  std::string way_back() const;

  // Changes the settings that all later commits record.
  void set_settings(std::string settings, std::uint64_t config_hash);

 private:
  struct Wanted {
    StepEnd end;
    bool is_now = false;  // requested by want_now() or want_first()
  };

  struct Hold {
    std::uint64_t step = 0;
    std::uint32_t uses = 0;
  };

  // Returns whether all blocks of the commit are on storage.
  bool is_stored(const Wanted& wanted, const Progress& progress) const;
  bool may_begin(const Wanted& wanted, const Progress& progress);
  void begin_held();
  void begin_next();
  void begin(StepEnd end);
  // If the device has failed, the engine fails with the same failure, and the call returns false.
  bool is_device_sound();
  void ended(const std::optional<Error>& failure);

  BlockStore& store_;
  Scheduler& scheduler_;
  Device& device_;
  const Event probe_;  // never recorded; a wait for this event reports a device failure
  std::function<void()> on_change_;
  CommitRecord record_;  // holds the parts that all commits share
  std::uint32_t next_slot_;
  std::uint64_t next_generation_;
  const std::uint32_t commit_every_;
  const bool has_others_;
  std::uint32_t data_file_count_;

  std::deque<Wanted> wanted_;
  StepEnd last_;  // the last finished step
  std::optional<Hold> hold_;
  bool is_last_ = false;                       // the commit in the writer has begun after a failure
  bool is_held_stored_ = false;                // the first of wanted_ waits only for hold_
  std::uint64_t flush_ns_ = 0;                 // time of the last commit's flush; 0: unknown
  std::uint64_t finished_ns_ = 0;              // when the last step finished; 0: none
  std::uint64_t step_ns_ = 0;                  // between the last two steps' ends; 0: unknown
  std::uint64_t begun_step_ = 0;               // step of the last commit whose table was made
  std::optional<std::uint64_t> durable_step_;  // empty: none
  std::string durable_application_;
  StepEnd committing_;                            // the commit that the writer is writing
  std::map<std::uint64_t, std::uint32_t> saved_;  // by step: saved blocks whose home is memory
  bool is_stopped_ = false;

  HomeSaver saver_;
  CommitWriter writer_;
};

}  // namespace sluice
