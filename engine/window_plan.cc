#include "engine/window_plan.h"

#include <algorithm>
#include <functional>
#include <optional>

#include <fmt/format.h>

#include "base/error.h"
#include "base/units.h"

namespace sluice {
namespace {

constexpr std::uint32_t kNever = WindowResident::kNever;
constexpr std::uint64_t kWindowAlignBytes = 4096;

// What it costs to place a unit at `begin_bytes`: the soonest that any unit evicted for it is
// needed again (later is better), and how long one has to wait until the last of them has been used
// (earlier is better: prefetch can start sooner).
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

// Whether a resident overlaps [begin, begin + length).
auto overlaps(std::uint64_t begin_bytes, std::uint64_t length_bytes) {
  return [=](const WindowResident& other) {
    return other.begin_bytes < begin_bytes + length_bytes && begin_bytes < other.end_bytes;
  };
}

class Planner {
 public:
  Planner(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
          std::uint64_t window_bytes, std::uint32_t concurrent_leases)
      : schedule_(schedule),
        unit_bytes_(unit_bytes),
        window_bytes_(window_bytes),
        concurrent_leases_(concurrent_leases),
        positions_(unit_bytes.size()) {
    for (std::uint32_t use = 0; use < schedule.size(); ++use)
      positions_[index_of(schedule[use].unit)].push_back(use);
  }

  // Plans the uses from plan.uses.size() on.
  void complete(WindowPlan& plan) {
    plan.uses.reserve(schedule_.size());
    for (auto use = static_cast<std::uint32_t>(plan.uses.size()); use < schedule_.size(); ++use)
      plan.uses.push_back(plan_use(use));
  }

  // Takes in who is where after the fetches of another schedule.
  void replay(const Schedule& schedule, const WindowPlan& plan, const WindowProgress& progress) {
    residents_ = plan.residents;
    for (std::uint32_t use = plan.first_use; use < progress.fetched; ++use) {
      const std::uint32_t unit = index_of(schedule[use].unit);
      if (unit_bytes_[unit] == 0) continue;
      if (plan.uses[use].fetch) occupy(unit, plan.uses[use].offset_bytes);
      if (use < progress.acquired) find(unit)->last_use = use;
    }
    if (!progress.is_partly_fetched) return;
    const std::uint32_t unit = index_of(schedule[progress.fetched].unit);
    std::erase_if(residents_, overlaps(plan.uses[progress.fetched].offset_bytes, bytes_of(unit)));
  }

  const std::vector<WindowResident>& residents() const { return residents_; }

 private:
  std::uint64_t bytes_of(std::uint32_t unit) const {
    return align_up(unit_bytes_[unit], kWindowAlignBytes);
  }

  std::vector<WindowResident>::iterator find(std::uint32_t unit) {
    return std::ranges::find(residents_, unit, &WindowResident::unit);
  }

  // Puts the unit there, in place of whoever is there.
  void occupy(std::uint32_t unit, std::uint64_t begin_bytes) {
    std::erase_if(residents_, overlaps(begin_bytes, bytes_of(unit)));
    const auto place = std::ranges::upper_bound(residents_, begin_bytes, std::less<>(),
                                                &WindowResident::begin_bytes);
    residents_.insert(place, {unit, begin_bytes, begin_bytes + bytes_of(unit), kNever});
  }

  WindowUse plan_use(std::uint32_t use) {
    const std::uint32_t unit = index_of(schedule_[use].unit);
    if (unit_bytes_[unit] == 0) return {};
    const auto resident = find(unit);
    if (resident != residents_.end()) {
      resident->last_use = use;
      return {.offset_bytes = resident->begin_bytes, .fetch = false, .evicted_uses = {}};
    }
    const Candidate best = choose(use, bytes_of(unit));
    WindowUse result{.offset_bytes = best.begin_bytes, .fetch = true, .evicted_uses = {}};
    const auto is_evicted = overlaps(best.begin_bytes, bytes_of(unit));
    for (const WindowResident& other : residents_) {
      if (is_evicted(other) && other.last_use != kNever)
        result.evicted_uses.push_back(other.last_use);
    }
    occupy(unit, best.begin_bytes);
    find(unit)->last_use = use;
    return result;
  }

  // The best place among those that start where a resident starts or ends, end where one starts, or
  // start at 0.
  Candidate choose(std::uint32_t use, std::uint64_t bytes) const {
    std::optional<Candidate> best;
    const auto consider = [&](std::uint64_t begin) {
      const std::optional<Candidate> candidate = judge(use, begin, bytes);
      if (candidate && (!best || candidate->better_than(*best))) best = candidate;
    };
    consider(0);
    for (const WindowResident& resident : residents_) {
      consider(resident.begin_bytes);
      consider(resident.end_bytes);
      if (resident.begin_bytes >= bytes) consider(resident.begin_bytes - bytes);
    }
    if (!best) {
      throw Error(ErrorCode::kOutOfMemory,
                  fmt::format("the device window of {} cannot hold unit {} ({}) beside the units "
                              "still leased at use {} of the "
                              "schedule; raise memory.device",
                              format_bytes(window_bytes_), index_of(schedule_[use].unit),
                              format_bytes(bytes), use));
    }
    return *best;
  }

  // Nothing when the place lies outside the window or on a unit that is still leased.
  std::optional<Candidate> judge(std::uint32_t use, std::uint64_t begin,
                                 std::uint64_t bytes) const {
    if (begin + bytes > window_bytes_) return std::nullopt;
    Candidate candidate{.begin_bytes = begin};
    auto resident =
        std::ranges::upper_bound(residents_, begin, std::less<>(), &WindowResident::end_bytes);
    for (; resident != residents_.end() && resident->begin_bytes < begin + bytes; ++resident) {
      const bool was_used = resident->last_use != kNever;
      if (was_used && resident->last_use + concurrent_leases_ > use) return std::nullopt;
      candidate.evicts = true;
      candidate.soonest_reuse = std::min(candidate.soonest_reuse, next_use(resident->unit, use));
      if (!was_used) continue;
      candidate.latest_use = std::max(candidate.latest_use, resident->last_use);
      candidate.is_late = candidate.latest_use + concurrent_leases_ == use;
    }
    return candidate;
  }

  std::uint32_t next_use(std::uint32_t unit, std::uint32_t after) const {
    const auto& positions = positions_[unit];
    const auto next = std::upper_bound(positions.begin(), positions.end(), after);
    return next == positions.end() ? kNever : *next;
  }

  const Schedule& schedule_;
  std::span<const std::uint64_t> unit_bytes_;
  std::uint64_t window_bytes_;
  std::uint32_t concurrent_leases_;
  std::vector<std::vector<std::uint32_t>> positions_;  // of each unit in the schedule
  std::vector<WindowResident> residents_;              // by place; none overlap
};

}  // namespace

WindowPlan plan_window(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                       std::uint64_t window_bytes, std::uint32_t concurrent_leases) {
  WindowPlan plan;
  Planner(schedule, unit_bytes, window_bytes, concurrent_leases).complete(plan);
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
  planner.complete(result);
  return result;
}

std::uint64_t window_bytes_for(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
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
