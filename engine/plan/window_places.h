// While a step is planned, this class keeps a list of the units in the device window. The units are
// sorted in two ways: by place, and in the order in which the units should make room. The time of
// an operation grows with the logarithm of the number of units. So the planning is quick even for
// models with many small units. Only engine/plan/window_plan.cc uses this header.
//
// Thread rule: one thread, because one plan owns the object.
// Invariants: no two places overlap, and no unit has two places.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "engine/plan/window_plan.h"

namespace sluice {

// A unit's position in the order in which units should make room. The unit with the latest next use
// comes first in this order. Among units with the same next use, the unit whose last use is longest
// ago comes first.
struct WindowTurn {
  std::uint32_t next_use = 0;
  std::uint32_t last_use = 0;  // 0 for a unit that was only fetched ahead
  std::uint64_t begin_bytes = 0;

  bool operator<(const WindowTurn& other) const {
    if (next_use != other.next_use) return next_use > other.next_use;
    if (last_use != other.last_use) return last_use < other.last_use;
    return begin_bytes < other.begin_bytes;
  }
};

class WindowPlaces {
 public:
  using ByPlace = std::map<std::uint64_t, WindowResident>;

  WindowPlaces(std::size_t unit_count, std::uint64_t window_bytes);

  const WindowResident* find(std::uint32_t unit) const;
  // Puts a unit at a place. All units that overlap this place lose their places. The unit that is
  // put there loses its former place.
  void put(const WindowResident& resident, std::uint32_t next_use);
  // Requires: the unit has a place.
  void set_uses(std::uint32_t unit, std::uint32_t last_use, std::uint32_t next_use);
  void remove(std::uint32_t unit);
  void remove_over(std::uint64_t begin_bytes, std::uint64_t end_bytes);

  // The lowest place of this length that overlaps no unit.
  std::optional<std::uint64_t> lowest_free(std::uint64_t length_bytes) const;
  // An iterator to the first unit whose place ends after `begin_bytes`. The next units follow in
  // the order of their places.
  ByPlace::const_iterator first_behind(std::uint64_t begin_bytes) const;
  const ByPlace& by_place() const { return by_place_; }
  const std::set<WindowTurn>& by_turn() const { return by_turn_; }

 private:
  static constexpr std::uint64_t kNowhere = UINT64_MAX;

  WindowTurn turn_of(const WindowResident& resident) const;
  ByPlace::iterator erase(ByPlace::iterator resident);
  void add_gap(std::uint64_t begin_bytes, std::uint64_t end_bytes);
  void erase_gap(std::uint64_t begin_bytes, std::uint64_t end_bytes);

  ByPlace by_place_;  // by begin
  std::set<WindowTurn> by_turn_;
  std::vector<std::uint64_t> begins_;                                 // by unit, or kNowhere
  std::vector<std::uint32_t> next_uses_;                              // by unit
  std::map<std::uint64_t, std::uint64_t> gaps_;                       // by begin: the gap's end
  std::set<std::pair<std::uint64_t, std::uint64_t>> gaps_by_length_;  // (length, begin)
};

}  // namespace sluice
