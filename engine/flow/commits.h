// The commits of a durable store. This class decides when each commit begins and becomes valid, and
// which stores have to wait for the commit. The commit of step v begins when every block is on
// storage at version v. The optimizer pass stores the blocks that live on storage. The home saver
// stores the blocks that live in memory. The commit itself, a flush and a small record, runs beside
// the next step.
// A store of a later version waits until the commit's table is taken. If all copies are named, such
// a store waits until the commit is valid.
//
// While a step fetches its units, it may hold back the commit of the previous step, because a flush
// makes reads wait (engine/plan/commit_turn.h).
//
// With several ranks a commit is valid once all ranks have it. Before a rank votes on step v + 1,
// the rank waits for its own commit of v. So the vote tells all ranks that the commit is valid.
//
// Thread rule: scheduler's thread only.
// Invariants: commits begin in the order of their steps, one at a time. A commit records the
// application's text and the loss scale as they were when finish() of its step ended. No commit
// begins after a failure of the device, because updates and copies on a failed device end without
// reporting the failure. After another failure, the only commit that may begin is a held commit
// whose state was on storage before the failure.
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

// The state that a store's commits continue from.
struct CommitStart {
  const CommitFiles* files = nullptr;
  CommitRecord record = {};  // the last record, or one without planes; identity and settings stay
  std::uint32_t next_slot = 0;
  std::uint64_t next_generation = 1;
  std::uint32_t commit_every = 1;
  bool has_others = false;  // other ranks must have each commit, too
};

class Commits {
 public:
  // All arguments must outlive the object. `on_change` runs whenever a commit has made progress.
  Commits(const CommitStart& start, const FlowParts& parts, std::function<void()> on_change);

  HomeSaver& saver() { return saver_; }

  // For the optimizer pass:
  //
  // Whether stores of update `step` may begin, because the commits of all earlier steps have their
  // tables.
  bool may_store(std::uint64_t step) const;
  // Whether update `step` will be committed, once all of its blocks are on storage.
  bool is_due(std::uint64_t step) const { return step % commit_every_ == 0; }
  // Takes note that the block is at rest as update `step` has left it.
  void updated(BlockId block, std::uint64_t step);
  // Takes note that the block is at rest, and that `step` leaves it unchanged.
  void left(BlockId block, std::uint64_t step);

  // The facts of a step that has just finished.
  struct StepEnd {
    std::uint64_t step = 0;
    CommittedScale scale = {};
    std::string application = {};
  };
  // Commits the step as soon as possible if it is due.
  void finished(StepEnd end);
  // Commits the last step now, even if no commit is due. Requires: all of the state is at home, and
  // no step is active. With other ranks, count_for_all() has been called, too.
  void want_now();
  // Makes the first commit, of the present state. Requires: all that want_now() requires.
  void want_first(StepEnd end);
  // Takes note that every rank now has all commits of this rank.
  void count_for_all();

  // Holds back the commit of `step` until the step that computes now has the units of its first
  // `uses` uses. release() and a failure of the engine end the hold, too. want_now() and
  // want_first() are not held. With several ranks, no commit is held, because the vote on the step
  // waits for that commit. If flushes take long by themselves, no commit is held either
  // (commit_may_wait). Requires: nothing that these units need waits for that commit.
  void hold(std::uint64_t step, std::uint32_t uses);
  void release();

  struct Progress {
    // Whether storage has every block that lives on storage, in the version that update `step` has
    // made.
    std::function<bool(std::uint64_t step)> is_stored;
    // Whether the step has the unit of this use.
    std::function<bool(std::uint32_t use)> has_unit;
  };
  // Advances everything that can move.
  void pump(const Progress& progress);
  // Begins nothing more, permanently.
  void stop();

  // Whether all commits that are due or requested are durable on this rank.
  bool is_durable() const { return wanted_.empty() && writer_.is_idle(); }
  // Whether nothing is under way.
  bool is_at_rest() const { return writer_.is_idle() && saver_.is_at_rest(); }
  // The last step whose commit is durable on this rank. The result is empty if there is no such
  // step yet.
  std::optional<std::uint64_t> durable_step() const { return durable_step_; }
  // The application's text in the record of durable_step().
  const std::string& application() const { return durable_application_; }
  std::string way_back() const;

  // Sets the settings for all records from now on.
  void set_settings(std::string settings, std::uint64_t config_hash);

 private:
  struct Wanted {
    StepEnd end;
    bool is_now = false;  // commit even if nothing else is under way
  };

  struct Hold {
    std::uint64_t step = 0;
    std::uint32_t uses = 0;
  };

  // Whether everything that the commit names is on storage.
  bool is_stored(const Wanted& wanted, const Progress& progress) const;
  bool may_begin(const Wanted& wanted, const Progress& progress);
  void begin_held();
  void begin_next();
  void begin(StepEnd end);
  // If the device has failed, this call fails the engine and returns false.
  bool is_device_sound();
  void ended(const std::optional<Error>& failure);

  BlockStore& store_;
  Scheduler& scheduler_;
  Device& device_;
  const Event probe_;  // never recorded: waiting for it only brings the device's failure
  std::function<void()> on_change_;
  CommitRecord record_;  // without the parts that differ in each commit
  std::uint32_t next_slot_;
  std::uint64_t next_generation_;
  const std::uint32_t commit_every_;
  const bool has_others_;
  std::uint32_t data_file_count_;

  std::deque<Wanted> wanted_;
  StepEnd last_;  // finished last
  std::optional<Hold> hold_;
  bool is_last_ = false;                       // begun after a failure
  bool is_held_stored_ = false;                // the first of wanted_ waits for hold_ alone
  std::uint64_t flush_ns_ = 0;                 // of the last commit; 0: unknown
  std::uint64_t finished_ns_ = 0;              // of the last step; 0: none
  std::uint64_t step_ns_ = 0;                  // between the last two steps' ends; 0: unknown
  std::uint64_t begun_step_ = 0;               // of the last commit whose table is taken
  std::optional<std::uint64_t> durable_step_;  // empty: none
  std::string durable_application_;
  StepEnd committing_;                            // in the writer's hands
  std::map<std::uint64_t, std::uint32_t> saved_;  // by step: blocks in memory that storage has
  bool is_stopped_ = false;

  HomeSaver saver_;
  CommitWriter writer_;
};

}  // namespace sluice
