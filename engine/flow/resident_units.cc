#include "engine/flow/resident_units.h"

#include <utility>

namespace sluice {

ResidentUnits::ResidentUnits(const Layout& layout, const Placement& placement, const Tiers& tiers,
                             Ranks& ranks, Device& device, std::span<const UnitId> forward_order)
    : layout_(layout),
      tiers_(tiers),
      ranks_(ranks),
      device_(device),
      is_updated_(layout.units().size(), false),
      is_left_(layout.units().size(), false),
      gathers_begun_ns_(layout.units().size()),
      stream_(device, "gathers of resident units") {
  std::vector<bool> is_listed(layout.units().size(), false);
  const auto append = [&](UnitId unit) {
    const UnitPlace& place = layout.unit(unit);
    if (is_listed[index_of(unit)] || place.is_frozen || !placement.unit_is_on_device(place)) return;
    is_listed[index_of(unit)] = true;
    order_.push_back(unit);
  };
  for (const UnitId unit : forward_order) append(unit);
  for (const UnitPlace& unit : layout.units()) append(unit.id);
  for (std::size_t unit = 0; unit < layout.units().size(); ++unit) {
    updated_events_.emplace_back(device);
    ready_events_.emplace_back(device);
  }
}

void ResidentUnits::updated(UnitId unit, StreamId stream) {
  if (!ranks_.shard_optimizer() || layout_.unit(unit).is_sharded)
    return device_.record(event(unit), stream);
  device_.record(updated_events_[index_of(unit)].id(), stream);
  if (layout_.unit(unit).is_frozen) return gather(unit);
  is_updated_[index_of(unit)] = true;
  gather_in_order();
}

void ResidentUnits::left(UnitId unit) {
  if (!ranks_.shard_optimizer() || layout_.unit(unit).is_sharded) return;
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
  device_.wait(stream_.id(), updated_events_[index_of(id)].id());
  ranks_.resident_gathers().all_gather(
      {.target = parameters,
       .source = parameters + unit.shard_begin * layout_.format().parameter_bytes(),
       .shard_bytes = layout_.shard_parameter_bytes(id),
       .subject = unit.name},
      {.unit = id,
       .size_bytes = payload_bytes,
       .step = unit.is_frozen ? 0 : updates_,
       .begun_ns = &gathers_begun_ns_[index_of(id)]},
      stream_.id());
  device_.record(event(id), stream_.id());
  gathered_bytes_ += payload_bytes;
}

std::uint64_t ResidentUnits::take_gathered_bytes() {
  return std::exchange(gathered_bytes_, 0);
}

}  // namespace sluice
