// How much of each tier's pools was in use at most, by phase of a step. Plain data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sluice {

enum class Tier : std::uint8_t { kDevice, kHost, kNvme };
inline constexpr std::size_t kTiers = 3;

std::string_view name_of(Tier tier);

enum class MemoryPool : std::uint8_t {
  // Device memory.
  kResidentParameters,
  kWindow,
  kGradientSlots,
  kDeviceGradients,
  kDeviceRecords,
  kDeviceTallies,
  kActivationWindow,
  // Host memory.
  kHostParameters,
  kParameterSlots,
  kHostGradients,
  kGradientStaging,
  kHostRecords,
  kLanes,  // with gradients of lanes
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

// What a pool is for, whatever its tier.
enum class MemoryKind : std::uint8_t {
  kParameters,     // at home
  kWindow,         // parameters that come and go; at ZeRO stage 3, gathered
  kGradients,      // those that wait for their update
  kGradientSlots,  // where ranks reduce them
  kOptimizer,      // records at home
  kBuffers,        // slots, lanes and staging on the way, tallies, and shadows
  kActivations,    // between units, where the engine keeps them
};
inline constexpr std::size_t kMemoryKinds = 7;
const char* name_of(MemoryKind kind);

Tier tier_of(MemoryPool pool);
MemoryKind kind_of(MemoryPool pool);

// What computation does meanwhile. The update of the step before goes on under forward.
enum class StepPhase : std::uint8_t { kForward, kBackward, kOptimizer };
inline constexpr std::size_t kStepPhases = 3;
const char* name_of(StepPhase phase);

// Bytes by pool, and of the pools of a tier or a kind together, each the most at one time.
struct PoolMarks {
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

// `marks` become those of both.
void raise_marks(PoolMarks& marks, const PoolMarks& others);
void raise_marks(PhaseMarks& marks, const PhaseMarks& others);

}  // namespace sluice
