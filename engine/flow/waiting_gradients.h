// Which gradients wait for their update, as the pool meter counts them: in memory each of a unit's
// blocks from the unit's first gradient of the step, and beside them what the set holds of other
// ranks' parts; on storage each block from its first write; until the update has had it. A unit's
// gradients of one step are gone before the next step brings others.
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
  // All must outlive it.
  WaitingGradients(const Layout& layout, const Placement& placement, Scheduler& scheduler);

  void begin_step() { units_.clear(); }
  // The unit's first gradient of the step has come. `keeps_others`: with what other ranks own of
  // it, as far as the set keeps that.
  void add(UnitId unit, bool keeps_others);
  // What other ranks own is of no use any more.
  void drop_others(UnitId unit);
  // Storage is being given the block's gradient.
  void written(BlockId block);
  // The update has had it.
  void consumed(BlockId block);
  // There will be no update with what the step has added.
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
