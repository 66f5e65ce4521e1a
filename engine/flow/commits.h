// The commits of a durable store: when each begins, what has to wait for it, and since when it
// counts. Step v is committed when every block is on storage at version v: what lives there has
// been stored by the optimizer pass, and what lives in memory by the home saver. The commit then
// runs beside the next step: a flush and a small record. Stores of later versions wait until its
// table is taken, and where all copies are named, until it counts.
//
// With several ranks a commit counts once all have it. Before a rank votes on step v + 1 it waits
// for its own commit of v, so the vote tells all.
//
// Thread rule: scheduler's thread only.
// Invariants: commits begin in the order of their steps, one at a time. What a commit records of
// the application and the loss scale is as of the end of finish() of its step.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/flow/home_saver.h"
#include "engine/store/commit_record.h"
#include "engine/store/commit_writer.h"

namespace sluice {

// What a store's commits go on from.
struct CommitStart {
  const CommitFiles* files = nullptr;
  CommitRecord record = {};  // the last one, or one without planes; identity and settings stay
  std::uint32_t next_slot = 0;
  std::uint64_t next_generation = 1;
  std::uint32_t commit_every = 1;
  bool has_others = false;  // ranks that have to have a commit, too
};

class Commits {
 public:
  // All must outlive it. `on_change` runs when something here has moved.
  Commits(const CommitStart& start, const Layout& layout, const Placement& placement,
          const Tiers& tiers, BlockStore& store, IoQueue& queue, Device& device,
          Scheduler& scheduler, std::function<void()> on_change);

  HomeSaver& saver() { return saver_; }

  // For the optimizer pass.
  // Stores of `version` may begin: the commits of all steps before it have their tables.
  bool may_store(std::uint64_t version) const;
  // The block is at rest at `version`.
  void updated(BlockId block, std::uint64_t version);

  // What is said of a step when finish() ends it.
  struct StepEnd {
    std::uint64_t step = 0;
    CommittedScale scale = {};
    std::string application = {};
  };
  // Commits the step in due time, where it is due.
  void finished(StepEnd end);
  // Commits the last step now, due or not. Requires: all of it is home, and no step is active;
  // where there are other ranks, count_for_all().
  void want_now();
  // The first commit, of the state as it is. Likewise.
  void want_first(StepEnd end);
  // Every rank has the commits that this one has.
  void count_for_all();

  // `is_stored`: every block that lives on storage is there at that version.
  void pump(const std::function<bool(std::uint64_t version)>& is_stored);
  // Begins nothing more, for good.
  void stop();

  // All commits that are due, or wanted, are durable here.
  bool is_durable() const { return wanted_.empty() && writer_.is_idle(); }
  // Nothing is under way.
  bool is_at_rest() const { return writer_.is_idle() && saver_.is_at_rest(); }
  // The last step whose commit is durable here; nothing: none yet.
  std::optional<std::uint64_t> durable_step() const { return durable_step_; }
  // What its record has of the application.
  const std::string& application() const { return durable_application_; }
  std::string way_back() const;

  // The settings of records from here on.
  void set_settings(std::string settings, std::uint64_t config_hash);

 private:
  struct Wanted {
    StepEnd end;
    bool is_now = false;  // nothing else is under way
  };

  bool is_due(std::uint64_t step) const { return step % commit_every_ == 0; }
  bool may_begin(const Wanted& wanted,
                 const std::function<bool(std::uint64_t version)>& is_stored) const;
  void begin(StepEnd end);
  void ended(const std::optional<Error>& failure);

  BlockStore& store_;
  Scheduler& scheduler_;
  std::function<void()> on_change_;
  CommitRecord record_;  // but for what each commit has of its own
  std::uint32_t next_slot_;
  std::uint64_t next_generation_;
  const std::uint32_t commit_every_;
  const bool has_others_;
  std::uint32_t data_file_count_;

  std::deque<Wanted> wanted_;
  StepEnd last_;                               // finished
  std::uint64_t begun_step_ = 0;               // of the last commit whose table is taken
  std::optional<std::uint64_t> durable_step_;  // nothing: none
  std::string durable_application_;
  StepEnd committing_;                            // the writer's
  std::map<std::uint64_t, std::uint32_t> saved_;  // by version: blocks in memory that storage has
  bool is_stopped_ = false;

  HomeSaver saver_;
  CommitWriter writer_;
};

}  // namespace sluice
