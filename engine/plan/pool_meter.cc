#include "engine/plan/pool_meter.h"

#include <algorithm>
#include <utility>

#include <sluice/error.h>

namespace sluice {
namespace {

struct PoolPlace {
  Tier tier{};
  MemoryKind kind{};
};

// By MemoryPool.
constexpr std::array<PoolPlace, kMemoryPools> kPlaces = {{
    {Tier::kDevice, MemoryKind::kParameters},    {Tier::kDevice, MemoryKind::kWindow},
    {Tier::kDevice, MemoryKind::kGradientSlots}, {Tier::kDevice, MemoryKind::kGradients},
    {Tier::kDevice, MemoryKind::kOptimizer},     {Tier::kDevice, MemoryKind::kBuffers},
    {Tier::kDevice, MemoryKind::kActivations},   {Tier::kHost, MemoryKind::kParameters},
    {Tier::kHost, MemoryKind::kBuffers},         {Tier::kHost, MemoryKind::kGradients},
    {Tier::kHost, MemoryKind::kBuffers},         {Tier::kHost, MemoryKind::kOptimizer},
    {Tier::kHost, MemoryKind::kBuffers},         {Tier::kHost, MemoryKind::kBuffers},
    {Tier::kHost, MemoryKind::kActivations},     {Tier::kHost, MemoryKind::kBuffers},
    {Tier::kNvme, MemoryKind::kParameters},      {Tier::kNvme, MemoryKind::kOptimizer},
    {Tier::kNvme, MemoryKind::kBuffers},         {Tier::kNvme, MemoryKind::kGradients},
    {Tier::kNvme, MemoryKind::kActivations},
}};

template <std::size_t kCount>
void raise(std::array<std::uint64_t, kCount>& marks,
           const std::array<std::uint64_t, kCount>& others) {
  for (std::size_t i = 0; i < kCount; ++i) marks[i] = std::max(marks[i], others[i]);
}

}  // namespace

const char* name_of(MemoryKind kind) {
  constexpr std::array<const char*, kMemoryKinds> kNames = {
      "parameters", "window", "gradients", "gradient_slots", "optimizer", "buffers", "activations"};
  return kNames[static_cast<std::size_t>(kind)];
}

const char* name_of(StepPhase phase) {
  constexpr std::array<const char*, kStepPhases> kNames = {"forward", "backward", "optimizer"};
  return kNames[static_cast<std::size_t>(phase)];
}

Tier tier_of(MemoryPool pool) {
  return kPlaces[static_cast<std::size_t>(pool)].tier;
}

MemoryKind kind_of(MemoryPool pool) {
  return kPlaces[static_cast<std::size_t>(pool)].kind;
}

void PoolMarks::add(MemoryPool pool, std::uint64_t size_bytes) {
  pool_bytes[static_cast<std::size_t>(pool)] += size_bytes;
  tier_bytes[static_cast<std::size_t>(tier_of(pool))] += size_bytes;
  kind_bytes[static_cast<std::size_t>(kind_of(pool))] += size_bytes;
}

void PoolMarks::remove(MemoryPool pool, std::uint64_t size_bytes) {
  pool_bytes[static_cast<std::size_t>(pool)] -= size_bytes;
  tier_bytes[static_cast<std::size_t>(tier_of(pool))] -= size_bytes;
  kind_bytes[static_cast<std::size_t>(kind_of(pool))] -= size_bytes;
}

void raise_marks(PoolMarks& marks, const PoolMarks& others) {
  raise(marks.pool_bytes, others.pool_bytes);
  raise(marks.tier_bytes, others.tier_bytes);
  raise(marks.kind_bytes, others.kind_bytes);
}

void raise_marks(PhaseMarks& marks, const PhaseMarks& others) {
  for (std::size_t phase = 0; phase < kStepPhases; ++phase)
    raise_marks(marks[phase], others[phase]);
}

std::uint64_t capacity_of(const Placement& placement, MemoryPool pool) {
  switch (pool) {
    case MemoryPool::kResidentParameters: return placement.resident_parameter_bytes;
    case MemoryPool::kWindow:
      return placement.window_bytes + placement.announced_window.size_bytes();
    case MemoryPool::kGradientSlots: return placement.gradient_slots.size_bytes();
    case MemoryPool::kDeviceGradients: return placement.device_gradient_bytes;
    case MemoryPool::kDeviceRecords: return placement.device_record_bytes;
    case MemoryPool::kDeviceTallies:
      return placement.tally_bytes + placement.update_staging.size_bytes();
    case MemoryPool::kActivationWindow: return placement.activation_window.size_bytes();
    case MemoryPool::kHostParameters: return placement.host_parameter_bytes;
    case MemoryPool::kParameterSlots: return placement.parameter_slots.size_bytes();
    case MemoryPool::kHostGradients: return placement.gradient_set_bytes;
    case MemoryPool::kGradientStaging: return placement.gradient_staging.size_bytes();
    case MemoryPool::kHostRecords: return placement.host_record_bytes;
    case MemoryPool::kLanes:
      return placement.lanes.size_bytes() + placement.lane_gradients.size_bytes();
    case MemoryPool::kHostTallies: return placement.tally_bytes + placement.update_flag_bytes();
    case MemoryPool::kHostActivations: return placement.host_activation_bytes;
    case MemoryPool::kActivationStaging: return placement.activation_staging.size_bytes();
    case MemoryPool::kNvmeParameters: return placement.nvme_parameter_bytes;
    case MemoryPool::kNvmeRecords: return placement.nvme_record_bytes;
    case MemoryPool::kShadows: return placement.shadow_bytes;
    case MemoryPool::kNvmeGradients: return placement.nvme_gradient_bytes;
    case MemoryPool::kNvmeActivations: break;
  }
  return placement.nvme_activation_bytes;
}

void PoolMeter::open(const Placement& placement) {
  for (std::size_t i = 0; i < kMemoryPools; ++i) {
    const auto pool = static_cast<MemoryPool>(i);
    set_capacity(pool, capacity_of(placement, pool));
  }
  for (const MemoryPool pool : {MemoryPool::kDeviceTallies, MemoryPool::kHostTallies,
                                MemoryPool::kActivationWindow, MemoryPool::kHostActivations})
    lend(pool, capacity_of(placement, pool));
}

void PoolMeter::set_capacity(MemoryPool pool, std::uint64_t size_bytes) {
  capacity_bytes_[static_cast<std::size_t>(pool)] = size_bytes;
}

void PoolMeter::lend(MemoryPool pool, std::uint64_t size_bytes) {
  lent_.add(pool, size_bytes);
  SLUICE_CHECK(lent_.most(pool) <= capacity_bytes_[static_cast<std::size_t>(pool)],
               "a pool lends no more than it has");
  note();
}

void PoolMeter::take_back(MemoryPool pool, std::uint64_t size_bytes) {
  SLUICE_CHECK(lent_.most(pool) >= size_bytes, "what comes back has been lent");
  lent_.remove(pool, size_bytes);
}

void PoolMeter::enter(StepPhase phase) {
  if (phase == phase_) return;
  phase_ = phase;
  note();
}

PhaseMarks PoolMeter::take() {
  const PhaseMarks marks = std::exchange(marks_, {});
  note();
  return marks;
}

void PoolMeter::note() {
  raise_marks(marks_[static_cast<std::size_t>(phase_)], lent_);
}

}  // namespace sluice
