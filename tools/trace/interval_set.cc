#include "tools/trace/interval_set.h"

#include <algorithm>

#include <sluice/error.h>

namespace sluice {

void IntervalSet::add(std::uint64_t begin_ns, std::uint64_t end_ns) {
  if (end_ns <= begin_ns) return;
  const bool is_next =
      !joined_.empty() && joined_.back().first <= begin_ns && begin_ns <= joined_.back().second;
  if (is_next) {
    joined_.back().second = std::max(joined_.back().second, end_ns);
  } else {
    joined_.emplace_back(begin_ns, end_ns);
  }
  if (use_ == For::kBusy) return;
  begins_.at.push_back(begin_ns);
  ends_.at.push_back(end_ns);
}

void IntervalSet::seal() {
  if (!std::ranges::is_sorted(joined_)) std::ranges::sort(joined_);
  std::size_t kept = 0;
  for (const Interval& next : joined_) {
    if (kept != 0 && next.first <= joined_[kept - 1].second) {
      joined_[kept - 1].second = std::max(joined_[kept - 1].second, next.second);
    } else {
      joined_[kept++] = next;
    }
  }
  joined_.resize(kept);
  std::uint64_t busy_ns = 0;
  for (const auto& [begin_ns, end_ns] : joined_) {
    busy_before_.push_back(busy_ns);
    busy_ns += end_ns - begin_ns;
  }
  if (use_ == For::kBusy) return;
  begins_.seal();
  ends_.seal();
}

std::uint64_t IntervalSet::busy_ns(std::uint64_t begin_ns, std::uint64_t end_ns) const {
  const auto busy_until = [this](std::uint64_t time_ns) -> std::uint64_t {
    const auto after = std::ranges::upper_bound(joined_, time_ns, {}, &Interval::first);
    if (after == joined_.begin()) return 0;
    const auto index = static_cast<std::size_t>(after - joined_.begin()) - 1;
    const auto& [first_ns, last_ns] = joined_[index];
    return busy_before_[index] + std::min(time_ns, last_ns) - first_ns;
  };
  return end_ns <= begin_ns ? 0 : busy_until(end_ns) - busy_until(begin_ns);
}

double IntervalSet::share(std::uint64_t begin_ns, std::uint64_t end_ns) const {
  if (end_ns <= begin_ns) return 0;
  return static_cast<double>(busy_ns(begin_ns, end_ns)) / static_cast<double>(end_ns - begin_ns);
}

double IntervalSet::depth(std::uint64_t begin_ns, std::uint64_t end_ns) const {
  SLUICE_CHECK(use_ == For::kDepth, "depth is asked of a set that was made for it");
  if (end_ns <= begin_ns) return 0;
  const double until_end = begins_.passed(end_ns) - ends_.passed(end_ns);
  const double until_begin = begins_.passed(begin_ns) - ends_.passed(begin_ns);
  return (until_end - until_begin) / static_cast<double>(end_ns - begin_ns);
}

void IntervalSet::Times::seal() {
  if (!std::ranges::is_sorted(at)) std::ranges::sort(at);
  // Sums of distances from the first, which are small enough to be exact.
  double sum = 0;
  for (const std::uint64_t time_ns : at) {
    sum_before.push_back(sum);
    sum += static_cast<double>(time_ns - at.front());
  }
  sum_before.push_back(sum);
}

double IntervalSet::Times::passed(std::uint64_t time_ns) const {
  const auto before = static_cast<std::size_t>(std::ranges::lower_bound(at, time_ns) - at.begin());
  if (before == 0) return 0;
  return static_cast<double>(before) * static_cast<double>(time_ns - at.front()) -
         sum_before[before];
}

}  // namespace sluice
