// How much of each tier's pools is in use, and the most of it in each phase of a step: buffers from
// when they are lent until they come back; homes of state from when they have been filled;
// gradients while they wait for their update; on storage also shadows until they are adopted or
// dropped, and activations until they have been read for the last time. What has a fixed owner that
// does not say when it holds something counts for good: the activation window, homes of activations
// in host memory, and tallies.
//
// Thread rule: scheduler's thread only.
// Invariant: no pool has more in use than it has.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <sluice/memory_marks.h>
#include "engine/plan/placement.h"

namespace sluice {

// What `pool` has room for, in bytes.
std::uint64_t capacity_of(const Placement& placement, MemoryPool pool);

class PoolMeter {
 public:
  // The pools of `placement`, and what of them counts for good.
  void open(const Placement& placement);
  void set_capacity(MemoryPool pool, std::uint64_t size_bytes);
  void lend(MemoryPool pool, std::uint64_t size_bytes);
  void take_back(MemoryPool pool, std::uint64_t size_bytes);

  // What is in use from now on counts for `phase`, with what is already.
  void enter(StepPhase phase);
  // Since the last call.
  PhaseMarks take();

 private:
  void note();

  PoolMarks lent_;
  std::array<std::uint64_t, kMemoryPools> capacity_bytes_{};
  PhaseMarks marks_;
  StepPhase phase_ = StepPhase::kForward;
};

}  // namespace sluice
