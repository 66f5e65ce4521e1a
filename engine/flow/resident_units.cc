#include "engine/flow/resident_units.h"

#include <utility>

namespace sluice {

ResidentUnits::ResidentUnits(const FlowParts& parts, std::function<void()> on_change)
    : layout_(parts.layout),
      tiers_(parts.tiers),
      ranks_(parts.ranks),
      device_(parts.device),
      scheduler_(parts.scheduler),
      on_change_(std::move(on_change)),
      is_updated_(parts.layout.units().size(), false),
      is_left_(parts.layout.units().size(), false),
      unqueued_(parts.layout.units().size()),
      gathers_begun_ns_(parts.layout.units().size()),
      stream_(parts.device, "gathers of resident units") {
  std::vector<bool> is_listed(layout_.units().size(), false);
  const auto append = [&](UnitId unit) {
    const UnitPlace& place = layout_.unit(unit);
    if (is_listed[index_of(unit)] || place.is_frozen || place.is_local ||
        !parts.placement.unit_is_on_device(place))
      return;
    is_listed[index_of(unit)] = true;
    order_.push_back(unit);
  };
  for (const UnitId unit : parts.model.forward_order) append(unit);
  for (const UnitPlace& unit : layout_.units()) append(unit.id);
  for (std::size_t unit = 0; unit < layout_.units().size(); ++unit) {
    updated_events_.emplace_back(device_);
    ready_events_.emplace_back(device_);
  }
}

void ResidentUnits::updated(UnitId unit, StreamId stream) {
  device_.record(updated_event(unit), stream);
  if (!is_gathered(unit)) return;
  if (layout_.unit(unit).is_frozen) return gather(unit);
  is_updated_[index_of(unit)] = true;
  gather_in_order();
}

void ResidentUnits::left(UnitId unit) {
  if (!is_gathered(unit)) return;
  is_updated_[index_of(unit)] = is_left_[index_of(unit)] = true;
  gather_in_order();
}

void ResidentUnits::gather_in_order() {
  while (is_updated_[index_of(order_[next_])]) {
    const UnitId unit = order_[next_];
    is_updated_[index_of(unit)] = false;
    if (is_left_[index_of(unit)]) {
      is_left_[index_of(unit)] = false;
    } else {
      gather(unit);
    }
    next_ = (next_ + 1) % order_.size();
    if (next_ == 0) ++updates_;
  }
}

void ResidentUnits::gather(UnitId id) {
  const UnitPlace& unit = layout_.unit(id);
  std::byte* const parameters = tiers_.resident_parameters(id);
  const std::uint64_t payload_bytes = unit.payload_elements * layout_.format().parameter_bytes();
  gathered_bytes_ += payload_bytes;
  ++unqueued_[index_of(id)];
  ++all_unqueued_;
  const AllGather gather{
      .target = parameters,
      .source = parameters + unit.shard_begin * layout_.format().parameter_bytes(),
      .shard_bytes = layout_.shard_parameter_bytes(id),
      .subject = unit.name};
  const CollectiveSpan span{.unit = id,
                            .size_bytes = payload_bytes,
                            .step = unit.is_frozen ? 0 : updates_,
                            .begun_ns = &gathers_begun_ns_[index_of(id)]};
  ranks_.resident_gathers().submit(
      scheduler_,
      [this, gather, span] {
        device_.wait(stream_.id(), updated_event(span.unit));
        ranks_.resident_gathers().all_gather(gather, span, stream_.id());
        device_.record(event(span.unit), stream_.id());
      },
      [this, id] {
        --unqueued_[index_of(id)];
        --all_unqueued_;
        on_change_();
      });
}

std::uint64_t ResidentUnits::take_gathered_bytes() {
  return std::exchange(gathered_bytes_, 0);
}

}  // namespace sluice
