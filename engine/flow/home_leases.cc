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

void HomeLeases::released(UnitId unit, EventId computed, LeaseGradient gradient) {
  if (!counts(unit)) return;
  if (gradient == LeaseGradient::kNone) return follow(unit, computed);
  if (gradient == LeaseGradient::kOwn) {
    open_.erase(unit);
  } else {
    open_.insert_or_assign(unit, computed);
  }
  ended(unit);
}

void HomeLeases::no_more_gradients() {
  for (const auto& [unit, computed] : open_) {
    ++leases_[index_of(unit)];
    follow(unit, computed);
  }
  open_.clear();
}

void HomeLeases::follow(UnitId unit, EventId computed) {
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
