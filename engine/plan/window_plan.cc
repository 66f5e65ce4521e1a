#include "engine/plan/window_plan.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/window_places.h"
#include "engine/plan/window_retreat.h"

namespace sluice {
namespace {

constexpr std::uint32_t kNever = WindowResident::kNever;

// The cost of placing a unit at `begin_bytes`: the soonest use of any unit evicted for it (later
// is better), and the last use of any of them (earlier is better, because prefetch can start
// sooner).
struct Candidate {
  std::uint64_t begin_bytes = 0;
  std::uint32_t soonest_reuse = kNever;
  std::uint32_t latest_use = 0;
  bool evicts = false;
  // A unit evicted for it is in use until just before: the fetch could not overlap with any
  // computation.
  bool is_late = false;

  bool better_than(const Candidate& other) const {
    if (evicts != other.evicts) return !evicts;
    if (is_late != other.is_late) return !is_late;
    if (soonest_reuse != other.soonest_reuse) return soonest_reuse > other.soonest_reuse;
    if (latest_use != other.latest_use) return latest_use < other.latest_use;
    return begin_bytes < other.begin_bytes;
  }
};

class Planner {
 public:
  Planner(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
          std::uint64_t window_bytes, std::uint32_t concurrent_leases,
          const WindowRetreat* retreat = nullptr)
      : schedule_(schedule),
        unit_bytes_(unit_bytes),
        window_bytes_(window_bytes),
        concurrent_leases_(concurrent_leases),
        retreat_(retreat),
        positions_(unit_bytes.size()),
        places_(unit_bytes.size(), window_bytes) {
    for (std::uint32_t use = 0; use < schedule.size(); ++use)
      positions_[index_of(schedule[use].unit)].push_back(use);
  }

  // Plans the uses from plan.uses.size() on; false when some use finds no place.
  bool try_complete(WindowPlan& plan) {
    plan.uses.reserve(schedule_.size());
    for (auto use = static_cast<std::uint32_t>(plan.uses.size()); use < schedule_.size(); ++use) {
      std::optional<WindowUse> planned = plan_use(use);
      if (!planned) return false;
      plan.uses.push_back(*std::move(planned));
    }
    plan.places_judged += places_judged_;
    return true;
  }

  void complete(WindowPlan& plan) {
    if (!try_complete(plan)) fail(static_cast<std::uint32_t>(plan.uses.size()));
  }

  [[noreturn]] void fail(std::uint32_t use) const {
    const std::uint32_t unit = index_of(schedule_[use].unit);
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("the device window of {} cannot hold unit {} ({}) beside the units "
                            "still leased at use {} of the schedule, and one of {} holds units in "
                            "any order; raise memory.device by the difference",
                            format_bytes(window_bytes_), unit, format_bytes(bytes_of(unit)), use,
                            format_bytes(any_order_window_bytes(unit_bytes_, concurrent_leases_))));
  }

  // Takes over the units and places after the fetches of another schedule.
  void replay(const Schedule& schedule, const WindowPlan& plan, const WindowProgress& progress) {
    acquired_ = progress.acquired;
    unleased_ = progress.unleased;
    const auto next = [&](std::uint32_t unit) { return next_use(unit, progress.acquired); };
    for (const WindowResident& resident : plan.residents)
      places_.put(resident, next(resident.unit));
    for (std::uint32_t use = plan.first_use; use < progress.fetched; ++use) {
      const std::uint32_t unit = index_of(schedule[use].unit);
      if (unit_bytes_[unit] == 0) continue;
      if (plan.uses[use].fetch) occupy(unit, plan.uses[use].offset_bytes, kNever, next(unit));
      if (use < progress.acquired) places_.set_uses(unit, use, next(unit));
    }
    if (!progress.is_partly_fetched) return;
    const std::uint32_t unit = index_of(schedule[progress.fetched].unit);
    const std::uint64_t begin_bytes = plan.uses[progress.fetched].offset_bytes;
    places_.remove(unit);
    places_.remove_over(begin_bytes, begin_bytes + bytes_of(unit));
  }

  std::vector<WindowResident> residents() const {
    std::vector<WindowResident> residents;
    for (const auto& [begin, resident] : places_.by_place()) residents.push_back(resident);
    return residents;
  }

  // The units whose leases the next use finds.
  std::vector<WindowResident> leased_residents() const {
    std::vector<WindowResident> leased = residents();
    std::erase_if(leased, [&](const WindowResident& of) { return !is_leased(of, acquired_); });
    return leased;
  }

 private:
  std::uint64_t bytes_of(std::uint32_t unit) const {
    return align_up(unit_bytes_[unit], kWindowAlignBytes);
  }

  void occupy(std::uint32_t unit, std::uint64_t begin_bytes, std::uint32_t last_use,
              std::uint32_t next_use) {
    places_.put({.unit = unit,
                 .begin_bytes = begin_bytes,
                 .end_bytes = begin_bytes + bytes_of(unit),
                 .last_use = last_use},
                next_use);
  }

  bool is_leased(const WindowResident& resident, std::uint32_t use) const {
    return resident.last_use != kNever && resident.last_use + concurrent_leases_ > use &&
           (resident.last_use >= acquired_ || std::ranges::count(unleased_, resident.unit) == 0);
  }

  std::optional<WindowUse> plan_use(std::uint32_t use) {
    const std::uint32_t unit = index_of(schedule_[use].unit);
    if (unit_bytes_[unit] == 0) return WindowUse{};
    const WindowResident* const resident = places_.find(unit);
    if (resident != nullptr &&
        (is_leased(*resident, use) || leaves_room(use, resident->begin_bytes))) {
      places_.set_uses(unit, use, next_use(unit, use + 1));
      return WindowUse{.offset_bytes = resident->begin_bytes, .fetch = false, .evicted_uses = {}};
    }
    const std::uint64_t bytes = bytes_of(unit);
    const std::optional<Candidate> best =
        retreat_ == nullptr ? choose_by_turn(use, bytes) : choose(use, bytes);
    if (!best) return std::nullopt;
    WindowUse result{.offset_bytes = best->begin_bytes, .fetch = true, .evicted_uses = {}};
    const auto evict = [&](const WindowResident& other) {
      if (other.last_use != kNever) result.evicted_uses.push_back(other.last_use);
    };
    const std::uint64_t end_bytes = best->begin_bytes + bytes;
    const bool is_before = resident != nullptr && resident->end_bytes <= best->begin_bytes;
    const bool is_behind = resident != nullptr && resident->begin_bytes >= end_bytes;
    if (is_before) evict(*resident);
    for (auto other = places_.first_behind(best->begin_bytes);
         other != places_.by_place().end() && other->first < end_bytes; ++other)
      evict(other->second);
    if (is_behind) evict(*resident);
    occupy(unit, best->begin_bytes, use, next_use(unit, use + 1));
    return result;
  }

  // Whether the use's unit, placed there, overlaps no retreat of units that come while it is held.
  bool leaves_room(std::uint32_t use, std::uint64_t begin_bytes) const {
    if (retreat_ == nullptr) return true;
    const UnitId unit = schedule_[use].unit;
    const std::uint64_t end_bytes = begin_bytes + bytes_of(index_of(unit));
    std::size_t held_until = use + concurrent_leases_;
    for (std::size_t next = use + 1; next < std::min(held_until, schedule_.size()); ++next) {
      const std::uint32_t other = index_of(schedule_[next].unit);
      if (schedule_[next].unit == unit) {
        held_until = next + concurrent_leases_;
      } else if (const std::uint64_t begin = retreat_->begin_bytes[next];
                 begin < end_bytes && begin_bytes < begin + bytes_of(other)) {
        return false;
      }
    }
    return true;
  }

  // Makes `best` the place at `begin`, if it is better.
  void consider(std::uint32_t use, std::uint64_t begin, std::uint64_t bytes,
                std::optional<Candidate>& best) {
    ++places_judged_;
    const std::optional<Candidate> candidate = judge(use, begin, bytes);
    if (candidate && (!best || candidate->better_than(*best))) best = candidate;
  }
  // The places that start where a unit starts or ends, or end where it starts.
  template <class Body>
  static void for_each_place(const WindowResident& resident, std::uint64_t bytes,
                             const Body& body) {
    body(resident.begin_bytes);
    body(resident.end_bytes);
    if (resident.begin_bytes >= bytes) body(resident.begin_bytes - bytes);
  }

  // The best place among those that start where a resident starts or ends, end where one starts,
  // start at 0, or are the retreat. Empty where all of them are taken.
  std::optional<Candidate> choose(std::uint32_t use, std::uint64_t bytes) {
    std::optional<Candidate> best;
    consider(use, 0, bytes, best);
    for (const auto& [begin, resident] : places_.by_place())
      for_each_place(resident, bytes,
                     [&](std::uint64_t place) { consider(use, place, bytes, best); });
    if (retreat_ != nullptr) consider(use, retreat_->begin_bytes[use], bytes, best);
    return best;
  }

  // The same without a retreat, but looks at few places. A place that evicts units is met at the
  // first of them in the order in which they should make room. So places that are met later than a
  // good one need not be looked at.
  std::optional<Candidate> choose_by_turn(std::uint32_t use, std::uint64_t bytes) {
    if (const auto free = places_.lowest_free(bytes)) {
      ++places_judged_;
      return Candidate{.begin_bytes = *free};
    }
    std::optional<Candidate> best;
    for (const WindowTurn& turn : places_.by_turn()) {
      if (best && !best->is_late && is_worse(turn, *best)) break;
      const WindowResident& evicted = places_.by_place().at(turn.begin_bytes);
      if (is_leased(evicted, use)) continue;
      const auto consider_if_over = [&](std::uint64_t place) {
        if (place < evicted.end_bytes && evicted.begin_bytes < place + bytes)
          consider(use, place, bytes, best);
      };
      consider_if_over(0);
      const std::uint64_t low = evicted.begin_bytes - std::min(evicted.begin_bytes, bytes);
      for (auto near = places_.first_behind(low);
           near != places_.by_place().end() && near->first < evicted.end_bytes + bytes; ++near)
        for_each_place(near->second, bytes, consider_if_over);
    }
    return best;
  }

  // Whether a place that evicts this unit, and none that comes before it in the order, is worse.
  static bool is_worse(const WindowTurn& turn, const Candidate& than) {
    if (turn.next_use != than.soonest_reuse) return turn.next_use < than.soonest_reuse;
    return turn.last_use > than.latest_use;
  }

  // Empty when the place is outside the window, on a unit that is still leased, or in the way.
  std::optional<Candidate> judge(std::uint32_t use, std::uint64_t begin,
                                 std::uint64_t bytes) const {
    if (begin + bytes > window_bytes_) return std::nullopt;
    Candidate candidate{.begin_bytes = begin};
    for (auto at = places_.first_behind(begin);
         at != places_.by_place().end() && at->first < begin + bytes; ++at) {
      const WindowResident& resident = at->second;
      if (is_leased(resident, use)) return std::nullopt;
      candidate.evicts = true;
      candidate.soonest_reuse = std::min(candidate.soonest_reuse, next_use(resident.unit, use + 1));
      if (resident.last_use == kNever) continue;
      candidate.latest_use = std::max(candidate.latest_use, resident.last_use);
      candidate.is_late = candidate.latest_use + concurrent_leases_ >= use;
    }
    if (!leaves_room(use, begin)) return std::nullopt;
    return candidate;
  }

  // The unit's first use from `from` on.
  std::uint32_t next_use(std::uint32_t unit, std::uint32_t from) const {
    const auto& positions = positions_[unit];
    const auto next = std::ranges::lower_bound(positions, from);
    return next == positions.end() ? kNever : *next;
  }

  const Schedule& schedule_;
  std::span<const std::uint64_t> unit_bytes_;
  std::uint64_t window_bytes_;
  std::uint32_t concurrent_leases_;
  const WindowRetreat* retreat_;                       // may be null
  std::uint32_t acquired_ = 0;                         // uses before a change of the schedule
  std::vector<std::uint32_t> unleased_;                // as in WindowProgress
  std::vector<std::vector<std::uint32_t>> positions_;  // of each unit in the schedule
  WindowPlaces places_;
  std::uint64_t places_judged_ = 0;
};

// The places of a step that is planned without a retreat, if that succeeds.
std::optional<WindowRetreat> retreat_by_the_rule(const Schedule& schedule,
                                                 std::span<const std::uint64_t> unit_bytes,
                                                 std::uint64_t window_bytes,
                                                 std::uint32_t concurrent_leases) {
  WindowPlan plan;
  if (!Planner(schedule, unit_bytes, window_bytes, concurrent_leases).try_complete(plan))
    return std::nullopt;
  WindowRetreat retreat{.begin_bytes = {}, .window_bytes = window_bytes};
  for (const WindowUse& use : plan.uses) retreat.begin_bytes.push_back(use.offset_bytes);
  return retreat;
}

// A retreat that fits every window of at least its size; for several leases.
WindowRetreat retreat_of(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                         std::uint32_t concurrent_leases) {
  const std::uint64_t least_bytes = leased_bytes_max(schedule, unit_bytes, concurrent_leases);
  std::optional<WindowRetreat> retreat =
      retreat_by_the_rule(schedule, unit_bytes, least_bytes, concurrent_leases);
  return retreat ? *std::move(retreat) : packed_retreat(schedule, unit_bytes, concurrent_leases);
}

}  // namespace

WindowPlan plan_window(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                       std::uint64_t window_bytes, std::uint32_t concurrent_leases) {
  WindowPlan plan;
  Planner planner(schedule, unit_bytes, window_bytes, concurrent_leases);
  if (planner.try_complete(plan)) return plan;
  if (window_bytes < least_window_bytes(schedule, unit_bytes, concurrent_leases))
    planner.fail(static_cast<std::uint32_t>(plan.uses.size()));
  const WindowRetreat retreat = concurrent_leases == 2
                                    ? retreat_to_both_ends(schedule, unit_bytes, window_bytes)
                                    : retreat_of(schedule, unit_bytes, concurrent_leases);
  plan.uses.clear();
  Planner(schedule, unit_bytes, window_bytes, concurrent_leases, &retreat).complete(plan);
  return plan;
}

WindowPlan replan_window(const Schedule& schedule, const WindowPlan& plan,
                         const WindowProgress& progress, const Schedule& changed,
                         std::span<const std::uint64_t> unit_bytes, std::uint64_t window_bytes,
                         std::uint32_t concurrent_leases) {
  Planner planner(changed, unit_bytes, window_bytes, concurrent_leases);
  planner.replay(schedule, plan, progress);
  WindowPlan result;
  result.uses.assign(plan.uses.begin(), plan.uses.begin() + progress.acquired);
  result.first_use = progress.acquired;
  result.residents = planner.residents();
  const std::vector<WindowResident> leased = planner.leased_residents();
  if (planner.try_complete(result)) return result;
  const auto failed_use = static_cast<std::uint32_t>(result.uses.size());
  const auto retreat = retreat_around(leased, changed, progress.acquired, unit_bytes, window_bytes,
                                      concurrent_leases);
  if (!retreat) planner.fail(failed_use);
  result.uses.resize(progress.acquired);
  Planner around(changed, unit_bytes, window_bytes, concurrent_leases, &*retreat);
  around.replay(schedule, plan, progress);
  around.complete(result);
  return result;
}

std::uint64_t any_order_window_bytes(std::span<const std::uint64_t> unit_bytes,
                                     std::uint32_t concurrent_leases) {
  std::vector<std::uint64_t> sizes;
  for (const std::uint64_t bytes : unit_bytes) sizes.push_back(align_up(bytes, kWindowAlignBytes));
  std::ranges::sort(sizes, std::greater<>());
  if (sizes.empty() || sizes.front() == 0) return 0;
  sizes.resize(std::min<std::size_t>(sizes.size(), concurrent_leases));
  const std::uint64_t gaps = sizes.size() * (sizes.front() - kWindowAlignBytes);
  return std::accumulate(sizes.begin() + 1, sizes.end(), gaps + kWindowAlignBytes);
}

std::uint64_t least_window_bytes(const Schedule& schedule,
                                 std::span<const std::uint64_t> unit_bytes,
                                 std::uint32_t concurrent_leases) {
  return concurrent_leases <= 2 ? leased_bytes_max(schedule, unit_bytes, concurrent_leases)
                                : retreat_of(schedule, unit_bytes, concurrent_leases).window_bytes;
}

std::uint64_t leased_bytes_max(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                               std::uint32_t leases) {
  std::uint64_t largest = 0;
  for (std::size_t first = 0; first < schedule.size(); ++first) {
    std::uint64_t sum = 0;
    const std::size_t last = std::min(schedule.size(), first + leases);
    for (std::size_t use = first; use < last; ++use) {
      const auto same = [&](const ScheduledUse& other) { return other.unit == schedule[use].unit; };
      const auto begin = schedule.begin() + static_cast<std::ptrdiff_t>(first);
      const auto here = schedule.begin() + static_cast<std::ptrdiff_t>(use);
      if (std::none_of(begin, here, same))
        sum += align_up(unit_bytes[index_of(schedule[use].unit)], kWindowAlignBytes);
    }
    largest = std::max(largest, sum);
  }
  return largest;
}

}  // namespace sluice
