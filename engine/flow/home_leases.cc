#include "engine/flow/home_leases.h"

#include <utility>

#include <sluice/error.h>

namespace sluice {

HomeLeases::HomeLeases(const FlowParts& parts, std::function<void()> on_change)
    : layout_(parts.layout),
      placement_(parts.placement),
      device_(parts.device),
      scheduler_(parts.scheduler),
      on_change_(std::move(on_change)),
      leases_(parts.layout.units().size()),
      stream_(parts.device, "leases at home") {}

void HomeLeases::acquired(UnitId unit) {
  if (counts(unit)) ++leases_[index_of(unit)];
}

void HomeLeases::released(UnitId unit, EventId computed, bool is_covered) {
  if (!counts(unit)) return;
  if (is_covered) return ended(unit);
  ++followed_;
  device_.wait(stream_.id(), computed);
  device_.notify(stream_.id(), [this, unit] {
    scheduler_.post([this, unit] {
      --followed_;
      ended(unit);
    });
  });
}

void HomeLeases::ended(UnitId unit) {
  SLUICE_CHECK(leases_[index_of(unit)] != 0, "a lease ends once");
  if (--leases_[index_of(unit)] == 0) on_change_();
}

}  // namespace sluice
