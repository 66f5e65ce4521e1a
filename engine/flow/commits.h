// The commits of a durable store: when each begins, the stores that have to wait for it, and when
// it becomes valid. Step v is committed when every block is on storage at version v: the optimizer
// pass has stored blocks that live there, and the home saver those that live in memory. The commit
// then runs beside the next step: a flush and a small record. Stores of later versions wait until
// its table is taken and, if all copies are named, until it is valid.
//
// With several ranks a commit is valid once all ranks have it. Before a rank votes on step v + 1 it
// waits for its own commit of v, so the vote tells all ranks.
//
// Thread rule: scheduler's thread only.
// Invariants: commits begin in the order of their steps, one at a time. A commit records the
// application's text and the loss scale as of the end of finish() of its step.
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

// The state that a store's commits continue from.
struct CommitStart {
  const CommitFiles* files = nullptr;
  CommitRecord record = {};  // the last one, or one without planes; identity and settings stay
  std::uint32_t next_slot = 0;
  std::uint64_t next_generation = 1;
  std::uint32_t commit_every = 1;
  bool has_others = false;  // other ranks must have each commit, too
};

class Commits {
 public:
  // All must outlive it. `on_change` runs when something here has moved.
  Commits(const CommitStart& start, const Layout& layout, const Placement& placement,
          const Tiers& tiers, BlockStore& store, IoQueue& queue, Device& device,
          Scheduler& scheduler, std::function<void()> on_change);

  HomeSaver& saver() { return saver_; }

  // For the optimizer pass:
  // Stores of `version` may begin: the commits of all steps before it have their tables.
  bool may_store(std::uint64_t version) const;
  // The block is at rest at `version`.
  void updated(BlockId block, std::uint64_t version);

  // The facts about a step that finish() gives at its end.
  struct StepEnd {
    std::uint64_t step = 0;
    CommittedScale scale = {};
    std::string application = {};
  };
  // Commits the step as soon as possible if it is due.
  void finished(StepEnd end);
  // Commits the last step now, due or not. Requires: all of its state is at home, and no step is
  // active; with other ranks, also count_for_all().
  void want_now();
  // The first commit, of the present state. Requires: as above.
  void want_first(StepEnd end);
  // Says that every rank has the commits that this one has.
  void count_for_all();

  // `is_stored`: whether every block that lives on storage is there at that version.
  void pump(const std::function<bool(std::uint64_t version)>& is_stored);
  // Begins nothing more, permanently.
  void stop();

  // Whether all commits that are due or requested are durable here.
  bool is_durable() const { return wanted_.empty() && writer_.is_idle(); }
  // Whether nothing is under way.
  bool is_at_rest() const { return writer_.is_idle() && saver_.is_at_rest(); }
  // The last step whose commit is durable here; empty: none yet.
  std::optional<std::uint64_t> durable_step() const { return durable_step_; }
  // The application's text in its record.
  const std::string& application() const { return durable_application_; }
  std::string way_back() const;

  // The settings of records from here on.
  void set_settings(std::string settings, std::uint64_t config_hash);

 private:
  struct Wanted {
    StepEnd end;
    bool is_now = false;  // commit even if nothing else is under way
  };

  bool is_due(std::uint64_t step) const { return step % commit_every_ == 0; }
  bool may_begin(const Wanted& wanted,
                 const std::function<bool(std::uint64_t version)>& is_stored) const;
  void begin(StepEnd end);
  void ended(const std::optional<Error>& failure);

  BlockStore& store_;
  Scheduler& scheduler_;
  std::function<void()> on_change_;
  CommitRecord record_;  // without the parts that differ in each commit
  std::uint32_t next_slot_;
  std::uint64_t next_generation_;
  const std::uint32_t commit_every_;
  const bool has_others_;
  std::uint32_t data_file_count_;

  std::deque<Wanted> wanted_;
  StepEnd last_;                               // finished last
  std::uint64_t begun_step_ = 0;               // of the last commit whose table is taken
  std::optional<std::uint64_t> durable_step_;  // empty: none
  std::string durable_application_;
  StepEnd committing_;                            // in the writer's hands
  std::map<std::uint64_t, std::uint32_t> saved_;  // by version: blocks in memory that storage has
  bool is_stopped_ = false;

  HomeSaver saver_;
  CommitWriter writer_;
};

}  // namespace sluice
