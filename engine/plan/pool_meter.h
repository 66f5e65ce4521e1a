// How much of each tier's pools is in use, and the most of it in each phase of a step. Buffers
// count from when they are lent until they come back; homes of state from when they have been
// filled; gradients while they wait for their update; on storage also shadows until they are
// adopted or dropped, and activations until their last read. Three kinds count all the time,
// because their owners do not report their use: the activation window, homes of activations in host
// memory, and tallies.
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
  // Sets the pools of `placement`, and those of them that count all the time.
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
