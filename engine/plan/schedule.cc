#include "engine/plan/schedule.h"

#include <algorithm>
#include <ranges>

namespace sluice {

std::string_view name_of(Pass pass) {
  switch (pass) {
    case Pass::kForward: return "forward";
    case Pass::kBackward: return "backward";
    case Pass::kInference: return "inference";
  }
  return "unknown";
}

Schedule training_schedule(const ModelSpec& model, std::uint32_t micro_batches,
                           MicroBatchOrder order) {
  Schedule schedule;
  schedule.reserve(micro_batches * (model.forward_order.size() + model.backward_order.size()));
  const auto add = [&](const std::vector<UnitId>& units, Pass pass, std::uint32_t repeats) {
    for (const UnitId unit : units)
      schedule.insert(schedule.end(), repeats, {.unit = unit, .pass = pass});
  };
  const bool is_vertical = order == MicroBatchOrder::kVertical;
  for (std::uint32_t round = 0; round < (is_vertical ? 1 : micro_batches); ++round) {
    add(model.forward_order, Pass::kForward, is_vertical ? micro_batches : 1);
    add(model.backward_order, Pass::kBackward, is_vertical ? micro_batches : 1);
  }
  mark_gradients(model, schedule);
  return schedule;
}

void mark_gradients(const ModelSpec& model, Schedule& schedule) {
  std::vector<bool> seen(model.units.size(), false);
  // Whether the use is the first of its unit, among the uses with a gradient that are passed in.
  const auto is_new = [&](const ScheduledUse& use) {
    const std::uint32_t unit = index_of(use.unit);
    if (use.pass != Pass::kBackward || model.units[unit].is_frozen || seen[unit]) return false;
    seen[unit] = true;
    return true;
  };
  for (ScheduledUse& use : schedule) use.first_gradient = is_new(use);
  seen.assign(model.units.size(), false);
  for (ScheduledUse& use : std::views::reverse(schedule)) use.final_gradient = is_new(use);
}

Schedule changed_schedule(const Schedule& expected, std::uint32_t acquired, UnitId unit, Pass pass,
                          std::uint32_t leases) {
  const auto here = expected.begin() + acquired;
  const auto is_same = [&](const ScheduledUse& use) {
    return use.unit == unit && use.pass == pass;
  };
  const auto planned = std::find_if(here, expected.end(), is_same);
  Schedule changed(expected.begin(), here);
  changed.push_back({.unit = unit, .pass = pass});
  if (planned == expected.end()) {
    auto earlier = std::find_if(std::reverse_iterator(here), expected.rend(), is_same).base();
    if (earlier == expected.begin()) earlier = here;  // none
    for (std::uint32_t more = 1; more < leases && earlier != here && earlier->pass == pass; ++more)
      changed.push_back(*earlier++);
  }
  changed.insert(changed.end(), planned == expected.end() ? here : planned + 1, expected.end());
  for (std::size_t use = acquired; use < changed.size(); ++use)
    changed[use].first_gradient = changed[use].final_gradient = false;
  return changed;
}

Schedule inference_schedule(const ModelSpec& model) {
  Schedule schedule;
  for (const UnitId unit : model.forward_order)
    schedule.push_back({.unit = unit, .pass = Pass::kInference});
  return schedule;
}

}  // namespace sluice
