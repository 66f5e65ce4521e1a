#include "engine/plan/window_retreat.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include <sluice/error.h>
#include <sluice/units.h>

namespace sluice {
namespace {

constexpr std::uint32_t kNoStay = UINT32_MAX;

struct Stay {
  std::uint32_t first_use = 0;
  std::uint32_t last_use = 0;
  std::uint64_t size_bytes = 0;
  std::uint64_t begin_bytes = 0;

  std::uint64_t end_bytes() const { return begin_bytes + size_bytes; }
};

class Stays {
 public:
  // The stays of `held` come first, and have their places.
  Stays(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes, std::uint32_t leases,
        std::uint32_t first_use = 0, std::span<const WindowResident> held = {})
      : leases_(leases), held_(held.size()), stay_of_(schedule.size(), kNoStay) {
    std::vector<std::uint32_t> latest(unit_bytes.size(), kNoStay);  // stay, by unit
    for (const WindowResident& resident : held) {
      latest[resident.unit] = stay_of_[resident.last_use] =
          static_cast<std::uint32_t>(stays_.size());
      stays_.push_back({.first_use = resident.last_use,
                        .last_use = resident.last_use,
                        .size_bytes = resident.end_bytes - resident.begin_bytes,
                        .begin_bytes = resident.begin_bytes});
    }
    for (std::uint32_t use = first_use; use < schedule.size(); ++use) {
      const std::uint32_t unit = index_of(schedule[use].unit);
      std::uint32_t& stay = latest[unit];
      if (stay == kNoStay || stays_[stay].last_use + leases_ <= use) {
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
  std::vector<std::uint32_t> without_place() const {
    std::vector<std::uint32_t> order(stays_.size() - held_);
    std::iota(order.begin(), order.end(), static_cast<std::uint32_t>(held_));
    return order;
  }

  // Places each as low as the earlier ones in `order` allow.
  WindowRetreat first_fit(std::span<const std::uint32_t> order) {
    std::vector<bool> is_placed(stays_.size(), false);
    std::fill_n(is_placed.begin(), held_, true);
    std::uint64_t window_bytes = 0;
    for (const std::uint32_t index : order) {
      Stay& stay = stays_[index];
      std::vector<const Stay*> others;  // placed, and held at the same time
      // A stay has a use in every `leases_` uses, so none spans this range without one.
      const std::size_t first = stay.first_use < leases_ ? 0 : stay.first_use - leases_ + 1;
      const std::size_t last = std::min<std::size_t>(stay_of_.size(), stay.last_use + leases_);
      for (std::size_t use = first; use < last; ++use)
        if (stay_of_[use] != kNoStay && is_placed[stay_of_[use]])
          others.push_back(&stays_[stay_of_[use]]);
      std::ranges::sort(others, std::less<>(), &Stay::begin_bytes);
      stay.begin_bytes = 0;
      for (const Stay* const other : others) {
        if (other->begin_bytes < stay.begin_bytes + stay.size_bytes)
          stay.begin_bytes = std::max(stay.begin_bytes, other->end_bytes());
      }
      is_placed[index] = true;
      window_bytes = std::max(window_bytes, stay.end_bytes());
    }
    return retreat(window_bytes);
  }

  // Places each at the end of the window where the one before it is not; for two leases. Returns
  // whether there was always such an end.
  bool to_both_ends(std::uint64_t window_bytes) {
    const std::uint64_t end_bytes = window_bytes / kWindowAlignBytes * kWindowAlignBytes;
    const Stay* before = nullptr;
    for (std::size_t index = 0; index < stays_.size(); ++index) {
      Stay& stay = stays_[index];
      if (stay.size_bytes == 0) continue;
      if (index >= held_) {
        if (stay.size_bytes > end_bytes) return false;
        stay.begin_bytes = 0;
        const auto is_in_the_way = [&] {
          return before != nullptr && before->last_use + leases_ > stay.first_use &&
                 stay.begin_bytes < before->end_bytes() && before->begin_bytes < stay.end_bytes();
        };
        if (is_in_the_way()) stay.begin_bytes = end_bytes - stay.size_bytes;
        if (is_in_the_way()) return false;
      }
      before = &stay;
    }
    return true;
  }

  WindowRetreat retreat(std::uint64_t window_bytes) const {
    WindowRetreat retreat{.begin_bytes = {}, .window_bytes = window_bytes};
    for (const std::uint32_t stay : stay_of_)
      retreat.begin_bytes.push_back(stay == kNoStay ? 0 : stays_[stay].begin_bytes);
    return retreat;
  }

 private:
  std::uint32_t leases_;
  std::size_t held_;                    // number of stays that have begun
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
  SLUICE_CHECK(stays.to_both_ends(window_bytes), "the window holds any two successive stays");
  return stays.retreat(window_bytes);
}

WindowRetreat packed_retreat(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                             std::uint32_t leases) {
  Stays stays(schedule, unit_bytes, leases);
  std::vector<std::uint32_t> order = stays.without_place();
  const WindowRetreat by_time = stays.first_fit(order);
  std::ranges::stable_sort(order, std::greater<>(),
                           [&](std::uint32_t stay) { return stays.all()[stay].size_bytes; });
  return std::ranges::min({by_time, stays.first_fit(order), side_by_side(schedule, unit_bytes)},
                          std::less<>(), &WindowRetreat::window_bytes);
}

std::optional<WindowRetreat> retreat_around(std::span<const WindowResident> held,
                                            const Schedule& schedule, std::uint32_t first_use,
                                            std::span<const std::uint64_t> unit_bytes,
                                            std::uint64_t window_bytes, std::uint32_t leases) {
  Stays stays(schedule, unit_bytes, leases, first_use, held);
  if (leases == 2) {
    if (!stays.to_both_ends(window_bytes)) return std::nullopt;
    return stays.retreat(window_bytes);
  }
  std::vector<std::uint32_t> order = stays.without_place();
  const WindowRetreat by_time = stays.first_fit(order);
  if (by_time.window_bytes <= window_bytes) return by_time;
  std::ranges::stable_sort(order, std::greater<>(),
                           [&](std::uint32_t stay) { return stays.all()[stay].size_bytes; });
  const WindowRetreat by_size = stays.first_fit(order);
  if (by_size.window_bytes <= window_bytes) return by_size;
  return std::nullopt;
}

}  // namespace sluice
