// The meter measures the present use of each tier's pools, and the peak use in each phase of a
// step. A buffer is counted while it is lent. A home of state is counted as soon as the home holds
// the state. A gradient is counted while it waits for its update. On storage, a shadow is counted
// until it is adopted or dropped, and an activation is counted until its last read. Some pools are
// always counted as full, because the owners of the pools do not report the bytes in use. The pools
// that are always counted as full are the activation window, the homes of activations in host
// memory, and the tallies.
//
// Thread rule: only the scheduler's thread may use the meter.
// Invariant: the bytes in use in a pool are never more than the pool's size.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <sluice/memory_marks.h>
#include "engine/plan/placement.h"

namespace sluice {

// The size of `pool`, in bytes.
std::uint64_t capacity_of(const Placement& placement, MemoryPool pool);

class PoolMeter {
 public:
  // Sets the sizes of the pools of `placement`. From now on, a pool is counted as full if its owner
  // does not report the bytes in use.
  void open(const Placement& placement);
  void set_capacity(MemoryPool pool, std::uint64_t size_bytes);
  void lend(MemoryPool pool, std::uint64_t size_bytes);
  void take_back(MemoryPool pool, std::uint64_t size_bytes);

  // From now on, all bytes in use are counted for `phase`, including the bytes that are in use
  // already.
  void enter(StepPhase phase);
  // The peak use in each phase since the last call.
  PhaseMarks take();

 private:
  void note();

  PoolMarks lent_;
  std::array<std::uint64_t, kMemoryPools> capacity_bytes_{};
  PhaseMarks marks_;
  StepPhase phase_ = StepPhase::kForward;
};

}  // namespace sluice
