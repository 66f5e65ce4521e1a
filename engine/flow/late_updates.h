// The updates that blocks have missed under optimizer.untouched "lazy". A step does not change
// units that it does not use. Before a unit is used, saved or read, its blocks make up for these
// updates, one after the other. Each such update has a gradient of zeros and the coefficients of
// its step, which this class keeps. So the bits are the same as under "update".
// Each entry of the queue names the step of its last update. Checkpoints and commits of that step
// wait for the entry. Later entries of the block wait for these checkpoints and commits.
//
// Thread rule: scheduler's thread only, except zeros().
// Invariant: entries of earlier steps come first.
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
    std::uint64_t step = 0;     // of its last update
    std::uint64_t version = 0;  // which this update makes
  };

  // `parts` must outlive the object.
  explicit LateUpdates(const FlowParts& parts);
  ~LateUpdates();
  LateUpdates(const LateUpdates&) = delete;
  LateUpdates& operator=(const LateUpdates&) = delete;

  bool is_lazy() const { return placement_.is_lazy; }
  // Takes note that update `step` has the coefficients `of_units`, and counts as an update of all
  // units.
  void applied(std::uint64_t step, const UnitCoefficients& of_units);
  // Whether the unit has missed the largest allowed number of updates. The last update has left
  // such a unit as it is, and none of its blocks waits here.
  bool has_missed_most(UnitId unit) const;
  // Asks the block to make up for its missed updates, up to its unit's version. The call has no
  // effect if no update is missing.
  // Requires: no other update is making this version of the block.
  void want(const BlockPlace& block);

  bool is_empty() const { return queue_.empty(); }
  const Entry& front() const { return queue_.front(); }
  void pop() { queue_.pop_front(); }
  // Whether an entry of update `step` or of an earlier update waits.
  bool waits_for(std::uint64_t step) const { return !is_empty() && front().step <= step; }
  // The coefficients of the updates from `version` on, in order.
  std::vector<std::shared_ptr<const UnitCoefficients>> missed(const Entry& entry,
                                                              std::uint64_t version) const;
  // A gradient of zeros for any block. Any thread.
  const std::byte* zeros() const { return zeros_; }

 private:
  const Layout& layout_;
  const Placement& placement_;
  const BlockStore& store_;
  const UnitVersions& versions_;
  const std::uint32_t lazy_max_;
  std::deque<Entry> queue_;
  std::vector<std::uint64_t> wanted_;  // by block: the highest version that has been wanted
  std::deque<std::shared_ptr<const UnitCoefficients>> applied_;  // of the last steps
  std::uint64_t last_step_ = 0;
  std::byte* zeros_ = nullptr;  // pages that are only read, and so take no memory
  std::size_t zeros_bytes_ = 0;
};

}  // namespace sluice
