// A set of intervals of time. For any stretch of time, the set tells how long at least one interval
// lasted, and how many intervals overlapped on average.
//
// Thread rule: one thread calls add(), and then seal(). After that, any thread may ask.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace sluice {

class IntervalSet {
 public:
  // A set for kDepth allows calls of depth(), and takes 32 bytes for each interval. A set for kBusy
  // takes next to no memory if intervals are added in order of time.
  enum class For : std::uint8_t { kBusy, kDepth };
  explicit IntervalSet(For use = For::kBusy) : use_(use) {}

  // Adds [begin, end). An empty interval is ignored.
  void add(std::uint64_t begin_ns, std::uint64_t end_ns);
  // Must be called after the last add().
  void seal();

  // The part of [begin, end) that lies in at least one interval.
  std::uint64_t busy_ns(std::uint64_t begin_ns, std::uint64_t end_ns) const;
  std::uint64_t busy_ns() const { return busy_ns(0, UINT64_MAX); }
  // The busy time as a share of [begin, end). The share is 0 if [begin, end) is empty.
  double share(std::uint64_t begin_ns, std::uint64_t end_ns) const;
  // The average number of simultaneous intervals over [begin, end).
  // Requires: kDepth.
  double depth(std::uint64_t begin_ns, std::uint64_t end_ns) const;

  using Interval = std::pair<std::uint64_t, std::uint64_t>;
  // The intervals in order of time. Intervals that touch or overlap are joined.
  const std::vector<Interval>& joined() const { return joined_; }

 private:
  // Sorted times. For each time, also the sum of all earlier times.
  struct Times {
    std::vector<std::uint64_t> at;
    std::vector<double> sum_before;
    void seal();
    // The sum of (time - at) over all `at` before `time`.
    double passed(std::uint64_t time_ns) const;
  };

  For use_;
  std::vector<Interval> joined_;
  std::vector<std::uint64_t> busy_before_;  // by joined interval
  Times begins_;
  Times ends_;
};

}  // namespace sluice
