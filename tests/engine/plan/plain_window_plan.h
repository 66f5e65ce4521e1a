// The plain search for places in the window. For every fetch, the search compares all places. The
// plain search defines the correct result. The results of engine/plan/window_plan.h must equal the
// results of the plain search. The search is slow, because its time grows with the product of the
// number of uses and the number of residents.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include <sluice/units.h>
#include "engine/plan/window_plan.h"
#include "engine/plan/window_retreat.h"

namespace sluice::test {

// The cost of placing a unit at `begin_bytes`. The cost has two parts. The first part is the
// earliest next use among the evicted units. A later use is better. The second part is the latest
// previous use among the evicted units. An earlier use is better, because the prefetch can then
// start sooner.
struct PlainCandidate {
  std::uint64_t begin_bytes = 0;
  std::uint32_t soonest_reuse = WindowResident::kNever;
  std::uint32_t latest_use = 0;
  bool evicts = false;
  // Says whether an evicted unit is still in use immediately before the fetch. If an evicted unit
  // is in use until the fetch, no computation runs at the same time as the fetch.
  bool is_late = false;

  bool better_than(const PlainCandidate& other) const {
    if (evicts != other.evicts) return !evicts;
    if (is_late != other.is_late) return !is_late;
    if (soonest_reuse != other.soonest_reuse) return soonest_reuse > other.soonest_reuse;
    if (latest_use != other.latest_use) return latest_use < other.latest_use;
    return begin_bytes < other.begin_bytes;
  }
};

class PlainWindowPlan {
 public:
  PlainWindowPlan(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                  std::uint64_t window_bytes, std::uint32_t leases)
      : schedule_(schedule),
        unit_bytes_(unit_bytes),
        window_bytes_(window_bytes),
        leases_(leases) {}

  // The result is empty if the search finds no place for one of the uses.
  std::optional<std::vector<WindowUse>> uses() {
    std::vector<WindowUse> uses;
    for (std::uint32_t use = 0; use < schedule_.size(); ++use) {
      std::optional<WindowUse> planned = plan_use(use);
      if (!planned) return std::nullopt;
      uses.push_back(*std::move(planned));
    }
    return uses;
  }

 private:
  std::uint64_t bytes_of(std::uint32_t unit) const {
    return align_up(unit_bytes_[unit], kWindowAlignBytes);
  }
  static bool overlaps(const WindowResident& resident, std::uint64_t begin, std::uint64_t bytes) {
    return resident.begin_bytes < begin + bytes && begin < resident.end_bytes;
  }

  std::optional<WindowUse> plan_use(std::uint32_t use) {
    const std::uint32_t unit = index_of(schedule_[use].unit);
    if (unit_bytes_[unit] == 0) return WindowUse{};
    const auto resident = std::ranges::find(residents_, unit, &WindowResident::unit);
    if (resident != residents_.end()) {
      resident->last_use = use;
      return WindowUse{.offset_bytes = resident->begin_bytes, .fetch = false, .evicted_uses = {}};
    }
    const std::uint64_t bytes = bytes_of(unit);
    const std::optional<PlainCandidate> best = choose(use, bytes);
    if (!best) return std::nullopt;
    WindowUse result{.offset_bytes = best->begin_bytes, .fetch = true, .evicted_uses = {}};
    for (const WindowResident& other : residents_)
      if (overlaps(other, best->begin_bytes, bytes)) result.evicted_uses.push_back(other.last_use);
    std::erase_if(residents_, [&](const WindowResident& other) {
      return overlaps(other, best->begin_bytes, bytes);
    });
    residents_.push_back({unit, best->begin_bytes, best->begin_bytes + bytes, use});
    std::ranges::sort(residents_, std::less<>(), &WindowResident::begin_bytes);
    return result;
  }

  std::optional<PlainCandidate> choose(std::uint32_t use, std::uint64_t bytes) const {
    std::optional<PlainCandidate> best;
    const auto consider = [&](std::uint64_t begin) {
      const std::optional<PlainCandidate> candidate = judge(use, begin, bytes);
      if (candidate && (!best || candidate->better_than(*best))) best = candidate;
    };
    consider(0);
    for (const WindowResident& resident : residents_) {
      consider(resident.begin_bytes);
      consider(resident.end_bytes);
      if (resident.begin_bytes >= bytes) consider(resident.begin_bytes - bytes);
    }
    return best;
  }

  std::optional<PlainCandidate> judge(std::uint32_t use, std::uint64_t begin,
                                      std::uint64_t bytes) const {
    if (begin + bytes > window_bytes_) return std::nullopt;
    PlainCandidate candidate{.begin_bytes = begin};
    for (const WindowResident& resident : residents_) {
      if (!overlaps(resident, begin, bytes)) continue;
      if (resident.last_use + leases_ > use) return std::nullopt;
      candidate.evicts = true;
      candidate.soonest_reuse = std::min(candidate.soonest_reuse, next_use(resident.unit, use));
      candidate.latest_use = std::max(candidate.latest_use, resident.last_use);
      candidate.is_late = candidate.latest_use + leases_ == use;
    }
    return candidate;
  }

  std::uint32_t next_use(std::uint32_t unit, std::uint32_t after) const {
    for (std::uint32_t use = after + 1; use < schedule_.size(); ++use)
      if (index_of(schedule_[use].unit) == unit) return use;
    return WindowResident::kNever;
  }

  const Schedule& schedule_;
  std::span<const std::uint64_t> unit_bytes_;
  std::uint64_t window_bytes_;
  std::uint32_t leases_;
  std::vector<WindowResident> residents_;  // by place
};

}  // namespace sluice::test
