// Simulates the commits of a durable store for the bound. The simulation includes the writes of the
// commits, and the stores and updates that wait for the commits. The rules of the simulation are in
// engine/bound/bound_simulation.h, and the engine's own rules are in engine/flow/commits.h.
//
// Thread rule: only one thread may use the object, because one simulation owns the object.
// Progress: a commit waits for the stores and saves of its version and for its own flushes. A
// commit never waits for a lane or a store of a later version.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "engine/bound/simulated_machine.h"

namespace sluice {

class SimulatedCommits {
 public:
  // All arguments must outlive the object. `on_saved` is called when a block may be updated again.
  SimulatedCommits(const StepShape& shape, SimulatedMachine& machine,
                   std::function<void(std::uint32_t block)> on_saved);

  bool are_made() const { return placement_.durable_copies != 0; }
  // Returns whether `version` of a block may be written to storage. The result is true if every
  // earlier commit has begun, and a copy of the block is free.
  bool may_store(std::uint64_t version) const;
  // The call records that version `version` of the block is at home.
  void updated(std::uint32_t block, std::uint64_t version);
  bool is_saving(std::uint32_t block) const { return is_saving_[block]; }

  void step_began();
  // Returns whether the commit may wait for the fetches of the step (engine/plan/commit_turn.h).
  bool may_wait() const;
  // Starts one save or one commit if a save or a commit may start now. The commit of `held_version`
  // is not started.
  bool pump(std::uint64_t held_version);
  // Handles the end of a job that belongs to a save or a flush.
  void end(const SimulatedJob& job);

 private:
  struct Save {
    std::uint32_t block = 0;
    std::uint64_t version = 0;
  };

  std::uint64_t last_due(std::uint64_t version) const {
    return (version - 1) / commit_every_ * commit_every_;
  }
  std::uint64_t bytes_in(std::uint32_t block, Tier tier) const;
  bool start_save();
  bool begin_commit(std::uint64_t held_version);
  void flush();

  const Layout& layout_;
  const Placement& placement_;
  SimulatedMachine& machine_;
  std::function<void(std::uint32_t block)> on_saved_;
  const std::uint64_t commit_every_;
  const double flush_s_;

  std::uint64_t trained_blocks_ = 0;
  std::uint64_t memory_blocks_ = 0;                // trained blocks with state at home in memory
  std::map<std::uint64_t, std::uint64_t> stored_;  // by version: the number of blocks
  std::uint64_t saved_ = 0;                        // blocks of the next commit
  std::deque<Save> saves_;
  std::vector<bool> is_saving_;  // by block
  std::uint64_t save_count_ = 0;
  std::uint64_t begun_ = 0;  // versions
  std::uint64_t durable_ = 0;
  std::uint32_t flushes_left_ = 0;
  double step_begin_s_ = 0;
  double last_step_s_ = 0;
};

}  // namespace sluice
