// The class handles the updates that blocks have missed. If optimizer.untouched is "lazy", a step
// changes only the units that the step uses. All other units are called unused units. The blocks of
// an unused unit make up for the missed updates, in order, before the unit is used, saved or read.
// Each missed update uses a gradient of zeros, and the coefficients of the step that was missed.
// This class keeps these coefficients. So the resulting bits are the same as under
// optimizer.untouched "update".
// The class has a queue of blocks that have to make up for updates. An entry names the step of the
// last missed update. A checkpoint or a commit of a step waits for all entries that name this step.
// If checkpoints or commits wait for an earlier entry of a block, a later entry of this block waits
// for these checkpoints and commits.
//
// Thread rule: scheduler's thread only, except zeros().
// Invariant: the queue is in the order of the entries' steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "engine/flow/flow_parts.h"
#include "engine/plan/parameter_groups.h"
#include "engine/plan/placement.h"
#include "engine/store/block_store.h"
#include "engine/store/unit_versions.h"

namespace sluice {

class LateUpdates {
 public:
  struct Entry {
    BlockId block{};
    std::uint64_t step = 0;     // of the last missed update
    std::uint64_t version = 0;  // the block's version after this update
  };

  // `parts` must outlive the object.
  explicit LateUpdates(const FlowParts& parts);
  ~LateUpdates();
  LateUpdates(const LateUpdates&) = delete;
  LateUpdates& operator=(const LateUpdates&) = delete;

  bool is_lazy() const { return placement_.is_lazy; }
  // Called when update number `step` is applied. `of_units` has the coefficients of this update.
  // The update counts as an update of all units, because unused units make up for this update
  // later.
  void applied(std::uint64_t step, const UnitCoefficients& of_units);
  // Returns true if the unit has missed the largest allowed number of updates and the queue has
  // none of the unit's blocks. If the result is true, the last update has not changed the unit.
  bool has_missed_most(UnitId unit) const;
  // Adds an entry to the queue. Because of this entry, the block makes up for all missed updates,
  // up to the version of the block's unit. If the block has missed no update, the call does
  // nothing.
  // Requires: no other update is bringing the block to the version of the block's unit.
  void want(const BlockPlace& block);

  bool is_empty() const { return queue_.empty(); }
  const Entry& front() const { return queue_.front(); }
  void pop() { queue_.pop_front(); }
  // Returns whether the queue has an entry of `step` or of an earlier step.
  bool waits_for(std::uint64_t step) const { return !is_empty() && front().step <= step; }
  // Returns the coefficients of all updates for which the entry stands, in the order of the
  // updates. Before the first of these updates, the block is at version `version`.
  std::vector<std::shared_ptr<const UnitCoefficients>> missed(const Entry& entry,
                                                              std::uint64_t version) const;
  // A gradient of zeros, large enough for any block. Any thread may call this function.
  const std::byte* zeros() const { return zeros_; }

 private:
  const Layout& layout_;
  const Placement& placement_;
  const BlockStore& store_;
  const UnitVersions& versions_;
  const std::uint32_t lazy_max_;
  std::deque<Entry> queue_;
  std::vector<std::uint64_t> wanted_;  // by block: the highest version passed to want()
  std::deque<std::shared_ptr<const UnitCoefficients>> applied_;  // of the last steps
  std::uint64_t last_step_ = 0;
  std::byte* zeros_ = nullptr;  // pages that take no memory, because nothing writes to them
  std::size_t zeros_bytes_ = 0;
};

}  // namespace sluice
