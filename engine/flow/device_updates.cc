#include "engine/flow/device_updates.h"

#include <algorithm>
#include <utility>

#include <sluice/error.h>
#include "base/trace/trace_recorder.h"
#include "engine/flow/device_block_update.h"

namespace sluice {
DeviceUpdates::DeviceUpdates(const FlowParts& parts, const ResidentUnits& residents,
                             DeviceMath* math,
                             std::function<void(UnitId unit, std::uint64_t step)> on_end)
    : layout_(parts.layout),
      tiers_(parts.tiers),
      residents_(residents),
      math_(math),
      device_(parts.device),
      scheduler_(parts.scheduler),
      worker_(parts.worker),
      on_end_(std::move(on_end)),
      begun_ns_(parts.layout.units().size()),
      is_running_(parts.layout.units().size(), false),
      stream_(parts.device, "optimizer on the device", StreamPriority::kHigh) {}

void DeviceUpdates::update(const BlockPlace& block, const StepCoefficients& coefficients) {
  const UnitPlace& unit = layout_.unit(block.unit);
  if (index_of(block.id) == unit.first_block) begun_ns_[index_of(block.unit)] = trace_now_ns();
  device_.wait(stream_.id(), residents_.event(block.unit));
  const BlockPlanes planes{.parameters = tiers_.device_parameters(block),
                           .record = tiers_.device_record(block.id),
                           .gradients = tiers_.device_gradient(block)};
  update_block_on_device(layout_, block, planes, coefficients,
                         tiers_.device_tally(block.unit).overflow, *math_, stream_.id());
}

void DeviceUpdates::end_unit(UnitId unit, std::uint64_t step) {
  ++units_left_;
  is_running_[index_of(unit)] = true;
  device_.copy(reinterpret_cast<std::byte*>(tiers_.host_tally(unit).overflow),
               reinterpret_cast<const std::byte*>(tiers_.device_tally(unit).overflow),
               sizeof(std::uint32_t), stream_.id());
  device_.notify(stream_.id(), [this, unit, step] {
    scheduler_.post([this, unit, step] { ended(unit, step); });
  });
}

void DeviceUpdates::ended(UnitId unit, std::uint64_t step) {
  const std::uint64_t elements = layout_.unit(unit).shard_elements;
  trace_span({.begin_ns = begun_ns_[index_of(unit)],
              .end_ns = trace_now_ns(),
              .size_bytes = elements * layout_.format().parameter_bytes() +
                            layout_.format().record_bytes(elements),
              .step = step,
              .unit = index_of(unit),
              .kind = TraceKind::kOnDevice,
              .detail = kTraceOptimizerState});
  const auto end = [this, unit, step] {
    --units_left_;
    is_running_[index_of(unit)] = false;
    on_end_(unit, step);
  };
  if (*tiers_.host_tally(unit).overflow == 0) return end();
  is_damaged_ = true;
  worker_.post([this, unit, step] { name_overflow(unit, step); }, end);
}

// On the worker's thread. Weights and moments are as the update left them.
void DeviceUpdates::name_overflow(UnitId id, std::uint64_t step) const {
  for (const BlockPlace& block : layout_.blocks_of(id)) {
    AlignedBuffer parameters =
        read_back(device_, tiers_.device_parameters(block), layout_.parameter_bytes(block.id));
    AlignedBuffer record =
        read_back(device_, tiers_.device_record(block.id), layout_.record_bytes(block.id));
    throw_if_overflowed(layout_, block, {.parameters = parameters.data(), .record = record.data()},
                        step);
  }
  throw Error(ErrorCode::kInternal, "an update on the device says that unit \"" +
                                        layout_.unit(id).name +
                                        "\" has overflowed, but all of it is finite");
}

}  // namespace sluice
