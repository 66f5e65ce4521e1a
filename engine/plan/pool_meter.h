// The use of each tier's pools at present, and the peak in each phase of a step. Buffers count
// while they are lent. The homes of a state count from the time when they are filled. Gradients
// count while they wait for their update. On storage, a shadow counts until it is adopted or
// dropped, and an activation counts until its last read. Some owners do not report their use: the
// owners of the activation window, of the homes of activations in host memory, and of tallies. So
// these pools count all the time.
//
// Thread rule: scheduler's thread only.
// Invariant: no pool has more in use than its size.
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
  // Sets the sizes of the pools of `placement`. Pools that are in use all the time are counted at
  // once.
  void open(const Placement& placement);
  void set_capacity(MemoryPool pool, std::uint64_t size_bytes);
  void lend(MemoryPool pool, std::uint64_t size_bytes);
  void take_back(MemoryPool pool, std::uint64_t size_bytes);

  // From now on, everything in use counts for `phase`, including what is in use already.
  void enter(StepPhase phase);
  // The marks since the last call.
  PhaseMarks take();

 private:
  void note();

  PoolMarks lent_;
  std::array<std::uint64_t, kMemoryPools> capacity_bytes_{};
  PhaseMarks marks_;
  StepPhase phase_ = StepPhase::kForward;
};

}  // namespace sluice
