// The gradients that wait for their update, as the pool meter counts them. In memory, all blocks of
// a unit count from the unit's first gradient of the step on. The part of the set that other ranks
// own counts, too. On storage, each block counts from its first write. A block's gradient counts
// until the update has used it. A unit's gradients of one step are gone before the next step brings
// new ones.
//
// Thread rule: scheduler's thread only.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/plan/layout.h"
#include "engine/run/scheduler.h"

namespace sluice {

class WaitingGradients {
 public:
  // All arguments must outlive the object.
  WaitingGradients(const Layout& layout, const Placement& placement, Scheduler& scheduler);

  void begin_step() { units_.clear(); }
  // Called when the unit's first gradient of the step has come. `keeps_others` says that the set
  // also keeps the other ranks' part of the gradient.
  void add(UnitId unit, bool keeps_others);
  // Called when the other ranks' part is no longer needed.
  void drop_others(UnitId unit);
  // Called when the block's gradient is being written to storage.
  void written(BlockId block);
  // Called when the update has used the block's gradient.
  void consumed(BlockId block);
  // Called when the gradients that the step has added will not be used for an update.
  void drop_step();

 private:
  void wait_for(BlockId block);
  MemoryPool pool_of(UnitId unit) const;
  std::uint64_t bytes_of(BlockId block) const;
  std::uint64_t others_bytes(UnitId unit) const;

  const Layout& layout_;
  const Placement& placement_;
  Scheduler& scheduler_;
  std::vector<bool> waits_;       // by block
  std::vector<bool> has_others_;  // by unit
  std::vector<UnitId> units_;     // of the step
};

}  // namespace sluice
