// The largest amount of memory that the pools of each tier have used, separately for each phase of
// a step. Plain data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <sluice/export.h>

namespace sluice {

enum class Tier : std::uint8_t { kDevice, kHost, kNvme };
inline constexpr std::size_t kTiers = 3;

SLUICE_EXPORT std::string_view name_of(Tier tier);

enum class MemoryPool : std::uint8_t {
  // Device memory.
  kResidentParameters,
  kWindow,
  kGradientSlots,
  kDeviceGradients,
  kDeviceRecords,
  kDeviceTallies,  // includes blocks that come only for their update
  kActivationWindow,
  // Host memory.
  kHostParameters,
  kParameterSlots,
  kHostGradients,
  kGradientStaging,
  kHostRecords,
  kLanes,  // includes the gradients of lanes
  kHostTallies,
  kHostActivations,
  kActivationStaging,
  // Storage.
  kNvmeParameters,
  kNvmeRecords,
  kShadows,
  kNvmeGradients,
  kNvmeActivations,
};
inline constexpr std::size_t kMemoryPools = 21;

// The purpose of a pool, in any tier.
enum class MemoryKind : std::uint8_t {
  kParameters,     // at home
  kWindow,         // fetched parameters; at ZeRO stage 3, gathered parameters
  kGradients,      // gradients that wait for their update
  kGradientSlots,  // for the reduction over ranks
  kOptimizer,      // records at home
  kBuffers,        // slots, lanes, staging for transfers, tallies and shadows
  kActivations,    // between units, if the engine keeps them
};
inline constexpr std::size_t kMemoryKinds = 7;
SLUICE_EXPORT const char* name_of(MemoryKind kind);

SLUICE_EXPORT Tier tier_of(MemoryPool pool);
SLUICE_EXPORT MemoryKind kind_of(MemoryPool pool);

// The kind of work that computation does. The update of the previous step may continue during
// kForward.
enum class StepPhase : std::uint8_t { kForward, kBackward, kOptimizer };
inline constexpr std::size_t kStepPhases = 3;
SLUICE_EXPORT const char* name_of(StepPhase phase);

// The peak number of bytes in use: for each pool, for all pools of a tier together, and for all
// pools of a kind together.
struct SLUICE_EXPORT PoolMarks {
  std::array<std::uint64_t, kMemoryPools> pool_bytes{};
  std::array<std::uint64_t, kTiers> tier_bytes{};
  std::array<std::uint64_t, kMemoryKinds> kind_bytes{};

  std::uint64_t most(MemoryPool pool) const { return pool_bytes[static_cast<std::size_t>(pool)]; }
  std::uint64_t most(Tier tier) const { return tier_bytes[static_cast<std::size_t>(tier)]; }
  std::uint64_t most(MemoryKind kind) const { return kind_bytes[static_cast<std::size_t>(kind)]; }

  void add(MemoryPool pool, std::uint64_t size_bytes);
  void remove(MemoryPool pool, std::uint64_t size_bytes);
};
using PhaseMarks = std::array<PoolMarks, kStepPhases>;  // by StepPhase

// Replaces each entry of `marks` with the matching entry of `others` if the entry of `others` is
// larger.
SLUICE_EXPORT void raise_marks(PoolMarks& marks, const PoolMarks& others);
SLUICE_EXPORT void raise_marks(PhaseMarks& marks, const PhaseMarks& others);

}  // namespace sluice
