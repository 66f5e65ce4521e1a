#include "engine/plan/window_places.h"

#include <algorithm>
#include <iterator>

namespace sluice {

WindowPlaces::WindowPlaces(std::size_t unit_count, std::uint64_t window_bytes)
    : begins_(unit_count, kNowhere), next_uses_(unit_count, 0) {
  add_gap(0, window_bytes);
}

const WindowResident* WindowPlaces::find(std::uint32_t unit) const {
  return begins_[unit] == kNowhere ? nullptr : &by_place_.at(begins_[unit]);
}

WindowTurn WindowPlaces::turn_of(const WindowResident& resident) const {
  return {.next_use = next_uses_[resident.unit],
          .last_use = resident.last_use == WindowResident::kNever ? 0 : resident.last_use,
          .begin_bytes = resident.begin_bytes};
}

void WindowPlaces::put(const WindowResident& resident, std::uint32_t next_use) {
  remove(resident.unit);
  remove_over(resident.begin_bytes, resident.end_bytes);
  const auto gap = std::prev(gaps_.upper_bound(resident.begin_bytes));
  const auto [begin, end] = *gap;
  erase_gap(begin, end);
  add_gap(begin, resident.begin_bytes);
  add_gap(resident.end_bytes, end);
  by_place_.emplace(resident.begin_bytes, resident);
  begins_[resident.unit] = resident.begin_bytes;
  next_uses_[resident.unit] = next_use;
  by_turn_.insert(turn_of(resident));
}

void WindowPlaces::set_uses(std::uint32_t unit, std::uint32_t last_use, std::uint32_t next_use) {
  WindowResident& resident = by_place_.at(begins_[unit]);
  by_turn_.erase(turn_of(resident));
  resident.last_use = last_use;
  next_uses_[unit] = next_use;
  by_turn_.insert(turn_of(resident));
}

void WindowPlaces::remove(std::uint32_t unit) {
  if (begins_[unit] != kNowhere) erase(by_place_.find(begins_[unit]));
}

void WindowPlaces::remove_over(std::uint64_t begin_bytes, std::uint64_t end_bytes) {
  auto resident = by_place_.find(
      first_behind(begin_bytes) == by_place_.end() ? kNowhere : first_behind(begin_bytes)->first);
  while (resident != by_place_.end() && resident->first < end_bytes) resident = erase(resident);
}

WindowPlaces::ByPlace::iterator WindowPlaces::erase(ByPlace::iterator resident) {
  const WindowResident gone = resident->second;
  by_turn_.erase(turn_of(gone));
  begins_[gone.unit] = kNowhere;
  std::uint64_t begin = gone.begin_bytes;
  std::uint64_t end = gone.end_bytes;
  // The gaps at both sides become one with it.
  const auto after = gaps_.find(end);
  if (after != gaps_.end()) {
    end = after->second;
    erase_gap(gone.end_bytes, end);
  }
  const auto next = gaps_.lower_bound(begin);
  if (next != gaps_.begin() && std::prev(next)->second == begin) {
    begin = std::prev(next)->first;
    erase_gap(begin, gone.begin_bytes);
  }
  add_gap(begin, end);
  return by_place_.erase(resident);
}

void WindowPlaces::add_gap(std::uint64_t begin_bytes, std::uint64_t end_bytes) {
  if (begin_bytes >= end_bytes) return;
  gaps_.emplace(begin_bytes, end_bytes);
  gaps_by_length_.emplace(end_bytes - begin_bytes, begin_bytes);
}

void WindowPlaces::erase_gap(std::uint64_t begin_bytes, std::uint64_t end_bytes) {
  gaps_.erase(begin_bytes);
  gaps_by_length_.erase({end_bytes - begin_bytes, begin_bytes});
}

std::optional<std::uint64_t> WindowPlaces::lowest_free(std::uint64_t length_bytes) const {
  std::optional<std::uint64_t> lowest;
  for (auto gap = gaps_by_length_.lower_bound({length_bytes, 0}); gap != gaps_by_length_.end();
       ++gap)
    lowest = std::min(lowest.value_or(gap->second), gap->second);
  return lowest;
}

WindowPlaces::ByPlace::const_iterator WindowPlaces::first_behind(std::uint64_t begin_bytes) const {
  const auto next = by_place_.upper_bound(begin_bytes);
  const bool reaches = next != by_place_.begin() && std::prev(next)->second.end_bytes > begin_bytes;
  return reaches ? std::prev(next) : next;
}

}  // namespace sluice
