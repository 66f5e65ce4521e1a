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
      shared_{.uses = AnnouncedUses(parts.model, parts.layout, parts.placement),
              .fetches = Prefetcher(parts, slots, residents,
                                    {.window = parts.tiers.announced_window(),
                                     .gathers = parts.ranks.announced_gathers()},
                                    {.on_change = on_change, .on_final_fetch = {}})} {
  if (parts.ranks.are_several() && std::ranges::any_of(layout_.units(), &UnitPlace::is_local))
    local_.reset(new Line{
        .uses = AnnouncedUses(parts.model, parts.layout, parts.placement, AnnouncedKind::kLocal),
        .fetches = Prefetcher(parts, slots, residents,
                              {.window = parts.tiers.announced_window(), .gathers = nullptr},
                              {.on_change = on_change, .on_final_fetch = {}})});
  for (const UnitPlace& unit : layout_.units()) {
    if (!unit.is_announced || is_own(unit.id)) continue;
    numbers_[index_of(unit.id)] = static_cast<std::uint32_t>(all_.size());
    all_.push_back(unit.id);
  }
}

void AnnouncedUnits::begin(std::uint64_t version) {
  for (Line* const line : {&shared_, local_.get()}) {
    if (line == nullptr) continue;
    line->come = 0;
    line->uses.begin();
    line->fetches.begin(line->uses.schedule(), line->uses.window(), version,
                        /*keeps_for_update=*/false);
  }
}

void AnnouncedUnits::add(std::span<const UnitId> units, Pass pass) {
  if (units.empty()) return;
  Line& line = line_of(units.front());
  line.uses.add(units, pass);
  line.fetches.follow_longer();
}

bool AnnouncedUnits::is_own(UnitId unit) const {
  return local_ != nullptr && layout_.unit(unit).is_local;
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
    if (is_own(unit) != is_own(units.front()))
      refuse_announced(fmt::format(
          "announce: one of the units \"{}\" and \"{}\" is local to this rank; "
          "announce local units in a call of their own, which other ranks need not make",
          layout_.unit(units.front()).name, place.name));
  }
}

void AnnouncedUnits::check_next(UnitId unit, Pass pass) const {
  const std::string& name = layout_.unit(unit).name;
  const Line& line = line_of(unit);
  const auto is_wanted = [&](const ScheduledUse& use) {
    return use.unit == unit && use.pass == pass;
  };
  if (!line.is_over() && is_wanted(line.next())) return;
  const Schedule& uses = line.uses.schedule();
  if (std::none_of(uses.begin() + line.come, uses.end(), is_wanted))
    refuse_announced(
        fmt::format("acquire: unit \"{}\" ({}) has not been announced; call announce() "
                    "before",
                    name, name_of(pass)));
  refuse_announced(fmt::format(
      "acquire: unit \"{}\" ({}) is used before \"{}\" ({}), which was "
      "announced earlier; keep to the order that announce() has returned",
      name, name_of(pass), layout_.unit(line.next().unit).name, name_of(line.next().pass)));
}

void AnnouncedUnits::require_over() const {
  for (const Line* const line : {&shared_, static_cast<const Line*>(local_.get())}) {
    if (line == nullptr || line->is_over()) continue;
    refuse_announced(
        fmt::format("finish: unit \"{}\" ({}) has been announced and not acquired; "
                    "acquire it and release it",
                    layout_.unit(line->next().unit).name, name_of(line->next().pass)));
  }
}

std::uint64_t AnnouncedUnits::read_bytes() const {
  return shared_.uses.read_bytes() + (local_ ? local_->uses.read_bytes() : 0);
}

std::uint64_t AnnouncedUnits::update_bytes() const {
  return shared_.uses.update_bytes() + (local_ ? local_->uses.update_bytes() : 0);
}

void AnnouncedUnits::pump() {
  shared_.fetches.pump();
  if (local_) local_->fetches.pump();
}

void AnnouncedUnits::stop() {
  shared_.fetches.stop();
  if (local_) local_->fetches.stop();
}

bool AnnouncedUnits::idle() const {
  return shared_.fetches.idle() && (!local_ || local_->fetches.idle());
}

void AnnouncedUnits::take_moved(StepReport& report) {
  shared_.fetches.take_moved(report);
  if (local_) local_->fetches.take_moved(report);
}

}  // namespace sluice
