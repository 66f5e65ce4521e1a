#include "engine/bound/planned_step.h"

#include <algorithm>
#include <utility>

#include "engine/plan/announced_uses.h"
#include "engine/plan/placement.h"

namespace sluice {
namespace {

ActivationPlan activations_of(const ActivationShape& step, const Placement& placement) {
  const std::uint32_t places = placement.activation_window.count;
  return places == 0 ? ActivationPlan{} : plan_activations(step, places);
}

}  // namespace

PlannedStep::PlannedStep(const ActivationShape& step, const Layout& layout,
                         const Placement& placement, std::uint32_t commit_every,
                         std::span<const PlannedAnnouncement> announcements)
    : layout_(layout),
      placement_(placement),
      schedule_(training_schedule(step.model, step.micro_batches, step.order)),
      window_(plan_window(schedule_, window_unit_bytes(layout, placement), placement.window_bytes,
                          step.model.concurrent_leases)),
      activations_(activations_of(step, placement)),
      commit_every_(commit_every) {
  if (!announcements.empty()) insert(step.model, announcements);
}

// Both plans have places of their own, so that the fetches of one never evict units of the other.
void PlannedStep::insert(const ModelSpec& model,
                         std::span<const PlannedAnnouncement> announcements) {
  struct Kind {
    AnnouncedUses uses;
    std::vector<std::uint32_t> new_places = {};
  };
  Kind shared{.uses = AnnouncedUses(model, layout_, placement_)};
  Kind local{.uses = AnnouncedUses(model, layout_, placement_, AnnouncedKind::kLocal)};
  const auto kind_of = [&](UnitId unit) -> Kind& {
    return placement_.splits_announced_window && layout_.unit(unit).is_local ? local : shared;
  };
  for (const PlannedAnnouncement& of : announcements)
    if (!of.units.empty()) kind_of(of.units.front()).uses.add(of.units, of.pass);
  const Schedule scheduled = std::move(schedule_);
  const WindowPlan scheduled_window = std::move(window_);
  schedule_.clear();
  window_ = {};
  std::vector<std::uint32_t> new_places;
  const auto append = [&](const Schedule& uses, const WindowPlan& plan,
                          std::vector<std::uint32_t>& places) {
    const std::size_t use = places.size();
    places.push_back(static_cast<std::uint32_t>(schedule_.size()));
    schedule_.push_back(uses[use]);
    window_.uses.push_back(plan.uses[use]);
    for (std::uint32_t& evicted : window_.uses.back().evicted_uses) evicted = places[evicted];
  };
  std::vector<std::uint32_t> begins;  // by use of the model's orders: the uses before it
  for (std::uint32_t use = 0; use <= scheduled.size(); ++use) {
    begins.push_back(static_cast<std::uint32_t>(schedule_.size()));
    for (const PlannedAnnouncement& of : announcements) {
      if (of.before_use != use) continue;
      for (const UnitId unit : of.units) {
        Kind& kind = kind_of(unit);
        append(kind.uses.schedule(), kind.uses.window(), kind.new_places);
      }
      announced_after_.resize(schedule_.size(), begins[of.announced_before]);
    }
    if (use == scheduled.size()) break;
    append(scheduled, scheduled_window, new_places);
    announced_after_.push_back(StepShape::kScheduled);
  }
  mark_gradients(model, schedule_);
  for (const PlannedAnnouncement& of : announcements) {
    for (const UnitId unit : of.units) {
      const UnitPlace& place = layout_.unit(unit);
      const bool is_late = of.missed_updates != 0 && placement_.is_lazy && !place.is_frozen &&
                           placement_.may_stay(place);
      if (is_late && std::ranges::find(late_units_, unit, &LateUnit::unit) == late_units_.end())
        late_units_.push_back({.unit = unit, .missed_updates = of.missed_updates});
    }
  }
}

StepShape PlannedStep::shape(const Rates& rates) const {
  return {layout_,       placement_,    schedule_,        window_,    rates,
          &activations_, commit_every_, announced_after_, late_units_};
}

}  // namespace sluice
