#include "engine/step/announced_units.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {
namespace {

[[noreturn]] void refuse_announced(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

}  // namespace

AnnouncedUnits::AnnouncedUnits(const FlowParts& parts, ParameterSlots& slots,
                               const ResidentUnits& residents, std::function<void()> on_change)
    : layout_(parts.layout),
      numbers_(parts.layout.units().size(), 0),
      uses_(parts.model, parts.layout, parts.placement),
      fetches_(
          parts, slots, residents,
          {.window = parts.tiers.announced_window(), .gathers = parts.ranks.announced_gathers()},
          {.on_change = std::move(on_change), .on_final_fetch = {}}) {
  for (const UnitPlace& unit : layout_.units()) {
    if (!unit.is_announced) continue;
    numbers_[index_of(unit.id)] = static_cast<std::uint32_t>(all_.size());
    all_.push_back(unit.id);
  }
}

void AnnouncedUnits::begin(std::uint64_t version) {
  come_ = 0;
  uses_.begin();
  fetches_.begin(uses_.schedule(), uses_.window(), version, /*keeps_for_update=*/false);
}

void AnnouncedUnits::add(std::span<const UnitId> units, Pass pass) {
  uses_.add(units, pass);
  fetches_.follow_longer();
}

void AnnouncedUnits::check_announcement(std::span<const UnitId> units) const {
  std::vector<bool> is_given(layout_.units().size());
  for (const UnitId unit : units) {
    if (index_of(unit) >= is_given.size())
      refuse_announced(fmt::format("announce: unit {} does not exist; the model has {}",
                                   index_of(unit), is_given.size()));
    const UnitPlace& place = layout_.unit(unit);
    if (!place.is_announced)
      refuse_announced(fmt::format(
          "announce: unit \"{}\" stands in the model's orders and comes without; acquire "
          "it, or set UnitSpec::is_announced",
          place.name));
    if (is_given[index_of(unit)])
      refuse_announced(
          fmt::format("announce: unit \"{}\" is given twice; a second use needs a "
                      "second announcement",
                      place.name));
    is_given[index_of(unit)] = true;
  }
}

void AnnouncedUnits::check_next(UnitId unit, Pass pass) const {
  const std::string& name = layout_.unit(unit).name;
  const auto is_wanted = [&](const ScheduledUse& use) {
    return use.unit == unit && use.pass == pass;
  };
  if (!is_over() && is_wanted(next())) return;
  if (std::none_of(uses_.schedule().begin() + come_, uses_.schedule().end(), is_wanted))
    refuse_announced(
        fmt::format("acquire: unit \"{}\" ({}) has not been announced; call announce() "
                    "before",
                    name, name_of(pass)));
  refuse_announced(
      fmt::format("acquire: unit \"{}\" ({}) is used before \"{}\" ({}), which was "
                  "announced earlier; keep to the order that announce() has returned",
                  name, name_of(pass), layout_.unit(next().unit).name, name_of(next().pass)));
}

void AnnouncedUnits::require_over() const {
  if (is_over()) return;
  refuse_announced(
      fmt::format("finish: unit \"{}\" ({}) has been announced and not acquired; "
                  "acquire it and release it",
                  layout_.unit(next().unit).name, name_of(next().pass)));
}

}  // namespace sluice
