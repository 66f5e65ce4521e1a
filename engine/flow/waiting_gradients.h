// This class counts the bytes of the gradients that wait for their update. The pool meter receives
// this count. If a unit's gradients wait in memory, the count begins when the unit's first gradient
// of the step has come. The gradients of all blocks of the unit are then counted. The gradient set
// may also hold parts of the unit's gradient that belong to other ranks. These parts are counted,
// too. If gradients wait on storage, a block's gradient is counted from the start of this
// gradient's first write. A block's gradient is no longer counted after the update has used this
// gradient. So the gradients of one step are no longer counted when the gradients of the next step
// come.
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
  // Called when the unit's first gradient of the step has come. `keeps_others` says whether the
  // gradient set also contains the other ranks' part of the gradient.
  void add(UnitId unit, bool keeps_others);
  // Called when the gradient set no longer needs the other ranks' part of the unit's gradient.
  void drop_others(UnitId unit);
  // Called when a write of the block's gradient to storage begins.
  void written(BlockId block);
  // Called when the update has used the block's gradient.
  void consumed(BlockId block);
  // Called when no update will use the gradients that add() has counted in this step.
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
  std::vector<UnitId> units_;     // passed to add() in this step
};

}  // namespace sluice
