// How much of the pools that lend buffers is lent, and the most of it in each phase of a step. What
// has a fixed owner, such as the gradient set or state at home in memory, is not lent.
//
// Thread rule: scheduler's thread only.
// Invariant: no pool lends more than it has.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sluice {

enum class BufferPool : std::uint8_t {
  kWindow,  // device memory, as the next
  kGradientSlots,
  kParameterSlots,  // host memory, as the rest
  kLanes,           // with gradients of lanes
  kGradientStaging,
  kActivationStaging,
};
inline constexpr std::size_t kBufferPools = 6;

// What computation does meanwhile. The update of the step before goes on under forward.
enum class StepPhase : std::uint8_t { kForward, kBackward, kOptimizer };
inline constexpr std::size_t kStepPhases = 3;

struct PoolMarks {
  std::array<std::uint64_t, kBufferPools> most_bytes{};  // by BufferPool
  // Of the pools of a tier together, at one time.
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;

  std::uint64_t most(BufferPool pool) const { return most_bytes[static_cast<std::size_t>(pool)]; }
};
using PhaseMarks = std::array<PoolMarks, kStepPhases>;  // by StepPhase

// `marks` become those of both.
void raise_marks(PhaseMarks& marks, const PhaseMarks& others);

class PoolMeter {
 public:
  void set_capacity(BufferPool pool, std::uint64_t size_bytes);
  void lend(BufferPool pool, std::uint64_t size_bytes);
  void take_back(BufferPool pool, std::uint64_t size_bytes);

  // What is lent from now on counts for `phase`, with what is lent already.
  void enter(StepPhase phase);
  // Since the last call.
  PhaseMarks take();

 private:
  void note();

  PoolMarks lent_;
  std::array<std::uint64_t, kBufferPools> capacity_bytes_{};
  PhaseMarks marks_;
  StepPhase phase_ = StepPhase::kForward;
};

}  // namespace sluice
