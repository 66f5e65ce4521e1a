#include "engine/plan/window_retreat.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include <sluice/units.h>

namespace sluice {
namespace {

struct Stay {
  std::uint32_t first_use = 0;
  std::uint32_t last_use = 0;
  std::uint64_t size_bytes = 0;
  std::uint64_t begin_bytes = 0;
};

class Stays {
 public:
  Stays(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes, std::uint32_t leases)
      : leases_(leases), stay_of_(schedule.size()) {
    constexpr std::uint32_t kNone = UINT32_MAX;
    std::vector<std::uint32_t> latest(unit_bytes.size(), kNone);  // stay, by unit
    for (std::uint32_t use = 0; use < schedule.size(); ++use) {
      const std::uint32_t unit = index_of(schedule[use].unit);
      std::uint32_t& stay = latest[unit];
      if (stay == kNone || stays_[stay].last_use + leases_ <= use) {
        stay = static_cast<std::uint32_t>(stays_.size());
        stays_.push_back({.first_use = use,
                          .last_use = use,
                          .size_bytes = align_up(unit_bytes[unit], kWindowAlignBytes)});
      }
      stays_[stay].last_use = use;
      stay_of_[use] = stay;
    }
  }

  std::vector<Stay>& all() { return stays_; }

  // Places each as low as the earlier ones in `order` allow.
  WindowRetreat first_fit(std::span<const std::uint32_t> order) {
    std::vector<bool> is_placed(stays_.size(), false);
    std::uint64_t window_bytes = 0;
    for (const std::uint32_t index : order) {
      Stay& stay = stays_[index];
      std::vector<const Stay*> others;  // placed, and held at the same time
      // A stay has a use in every `leases_` uses, so none spans this range without one.
      const std::size_t first = stay.first_use < leases_ ? 0 : stay.first_use - leases_ + 1;
      const std::size_t last = std::min<std::size_t>(stay_of_.size(), stay.last_use + leases_);
      for (std::size_t use = first; use < last; ++use)
        if (is_placed[stay_of_[use]]) others.push_back(&stays_[stay_of_[use]]);
      std::ranges::sort(others, std::less<>(), &Stay::begin_bytes);
      stay.begin_bytes = 0;
      for (const Stay* const other : others) {
        if (other->begin_bytes < stay.begin_bytes + stay.size_bytes)
          stay.begin_bytes = std::max(stay.begin_bytes, other->begin_bytes + other->size_bytes);
      }
      is_placed[index] = true;
      window_bytes = std::max(window_bytes, stay.begin_bytes + stay.size_bytes);
    }
    return retreat(window_bytes);
  }

  WindowRetreat retreat(std::uint64_t window_bytes) const {
    WindowRetreat retreat{.begin_bytes = {}, .window_bytes = window_bytes};
    for (const std::uint32_t stay : stay_of_)
      retreat.begin_bytes.push_back(stays_[stay].begin_bytes);
    return retreat;
  }

 private:
  std::uint32_t leases_;
  std::vector<Stay> stays_;             // by first use
  std::vector<std::uint32_t> stay_of_;  // by use
};

WindowRetreat side_by_side(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes) {
  WindowRetreat retreat;
  std::vector<std::uint64_t> begins;  // by unit
  for (const std::uint64_t bytes : unit_bytes) {
    begins.push_back(retreat.window_bytes);
    retreat.window_bytes += align_up(bytes, kWindowAlignBytes);
  }
  for (const ScheduledUse& use : schedule)
    retreat.begin_bytes.push_back(begins[index_of(use.unit)]);
  return retreat;
}

}  // namespace

WindowRetreat retreat_to_both_ends(const Schedule& schedule,
                                   std::span<const std::uint64_t> unit_bytes,
                                   std::uint64_t window_bytes) {
  Stays stays(schedule, unit_bytes, 2);
  const std::uint64_t end_bytes = window_bytes / kWindowAlignBytes * kWindowAlignBytes;
  bool is_at_end = false;
  for (Stay& stay : stays.all()) {
    if (stay.size_bytes == 0) continue;
    stay.begin_bytes = is_at_end ? end_bytes - stay.size_bytes : 0;
    is_at_end = !is_at_end;
  }
  return stays.retreat(window_bytes);
}

WindowRetreat packed_retreat(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                             std::uint32_t leases) {
  Stays stays(schedule, unit_bytes, leases);
  std::vector<std::uint32_t> order(stays.all().size());
  std::iota(order.begin(), order.end(), 0u);
  const WindowRetreat by_time = stays.first_fit(order);
  std::ranges::stable_sort(order, std::greater<>(),
                           [&](std::uint32_t stay) { return stays.all()[stay].size_bytes; });
  return std::ranges::min({by_time, stays.first_fit(order), side_by_side(schedule, unit_bytes)},
                          std::less<>(), &WindowRetreat::window_bytes);
}

}  // namespace sluice
