#include "engine/flow/streamed_updates.h"

#include <utility>

#include <sluice/error.h>
#include "base/trace/trace_recorder.h"
#include "engine/flow/device_block_update.h"
#include "engine/run/scheduler.h"
#include "engine/store/tiers.h"

namespace sluice {

StreamedUpdates::StreamedUpdates(const FlowParts& parts, const ResidentUnits& residents,
                                 DeviceMath* math)
    : layout_(parts.layout),
      placement_(parts.placement),
      tiers_(parts.tiers),
      residents_(residents),
      math_(math),
      device_(parts.device),
      scheduler_(parts.scheduler),
      parts_(update_slot(parts.layout)),
      slots_(parts.placement.update_staging.count),
      up_(parts.device, "updates up", StreamPriority::kHigh),
      update_(parts.device, "updates of streamed blocks", StreamPriority::kHigh),
      down_(parts.device, "updates down", StreamPriority::kHigh) {
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
    slots_[slot].arrived = Event(device_);
    slots_[slot].updated = Event(device_);
    free_slots_.push_back(slot);
  }
}

void StreamedUpdates::update(const BlockPlace& block, const BlockPlanes& planes,
                             const StepCoefficients& coefficients, std::uint64_t step,
                             std::function<void(bool has_overflowed)> on_end) {
  const std::uint32_t index = free_slots_.back();
  free_slots_.pop_back();
  Slot& slot = slots_[index];
  slot.block = block.id;
  slot.step = step;
  slot.begin_ns = trace_now_ns();
  slot.on_end = std::move(on_end);
  scheduler_.work().begin(Work::kCpu);

  const StateFormat& format = layout_.format();
  const bool stay = parameters_stay(block);
  const bool gradients_stay = placement_.gradient_is_on_device(block.unit);
  const std::uint64_t parameter_bytes = layout_.parameter_bytes(block.id);
  const std::uint64_t record_bytes = layout_.record_bytes(block.id);
  std::byte* const base = tiers_.update_slot(index);
  const BlockPlanes there{
      .parameters = stay ? planes.parameters : base,
      .record = base + parts_.record_offset,
      .gradients = gradients_stay ? planes.gradients : base + parts_.gradient_offset};
  Copies up, down;
  // An update rounds fp16 parameters from their masters and does not read them.
  if (!stay && format.master != MasterLayout::kFp16)
    up.add(there.parameters, planes.parameters, parameter_bytes);
  up.add(there.record, planes.record, record_bytes);
  if (!gradients_stay)
    up.add(base + parts_.gradient_offset, planes.gradients,
           block.element_count * format.gradient_bytes());
  enqueue(up, up_.id());
  device_.record(slot.arrived.id(), up_.id());

  device_.wait(update_.id(), slot.arrived.id());
  if (stay) device_.wait(update_.id(), residents_.event(block.unit));
  update_block_on_device(layout_, block, there, coefficients, device_flag(index), *math_,
                         update_.id());
  device_.record(slot.updated.id(), update_.id());

  device_.wait(down_.id(), slot.updated.id());
  if (!stay) down.add(planes.parameters, there.parameters, parameter_bytes);
  down.add(planes.record, there.record, record_bytes);
  down.add(reinterpret_cast<std::byte*>(tiers_.update_flag(index)),
           reinterpret_cast<const std::byte*>(device_flag(index)), sizeof(std::uint32_t));
  enqueue(down, down_.id());
  device_.notify(down_.id(), [this, index] { scheduler_.post([this, index] { ended(index); }); });
}

void StreamedUpdates::enqueue(const Copies& copies, StreamId stream) {
  for (const CopyPiece& piece : copies.pieces) copied_bytes_ += piece.size_bytes;
  device_.copy_all(copies.pieces, stream);
}

void StreamedUpdates::ended(std::uint32_t index) {
  Slot& slot = slots_[index];
  scheduler_.work().end(Work::kCpu);
  trace_span({.begin_ns = slot.begin_ns,
              .end_ns = trace_now_ns(),
              .size_bytes = layout_.parameter_bytes(slot.block) + layout_.record_bytes(slot.block),
              .step = slot.step,
              .unit = index_of(layout_.block(slot.block).unit),
              .block = index_of(slot.block),
              .kind = TraceKind::kOnDevice,
              .detail = kTraceOptimizerState});
  const bool has_overflowed = *tiers_.update_flag(index) != 0;
  // The update only ever sets the flag.
  if (has_overflowed)
    device_.fill_zero(reinterpret_cast<std::byte*>(device_flag(index)), sizeof(std::uint32_t),
                      up_.id());
  free_slots_.push_back(index);
  std::exchange(slot.on_end, nullptr)(has_overflowed);
}

std::uint32_t* StreamedUpdates::device_flag(std::uint32_t slot) const {
  return reinterpret_cast<std::uint32_t*>(tiers_.update_slot(slot) + parts_.flag_offset);
}

}  // namespace sluice
