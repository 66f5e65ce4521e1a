// A set of time intervals. For any range of time, the set can tell for how long at least one
// interval was active. The set can also tell how many intervals were active on average.
//
// Thread rule: one thread calls add() and then seal(). After seal(), any thread may call the const
// functions.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace sluice {

class IntervalSet {
 public:
  // A set for kDepth allows calls of depth(), and needs 32 bytes per interval. A set for kBusy does
  // not allow calls of depth(), but needs very little memory if intervals are added in order of
  // time.
  enum class For : std::uint8_t { kBusy, kDepth };
  explicit IntervalSet(For use = For::kBusy) : use_(use) {}

  // Adds the interval [begin, end). An empty interval is ignored.
  void add(std::uint64_t begin_ns, std::uint64_t end_ns);
  // Must be called after the last add().
  void seal();

  // Returns the time within the range [begin, end) in which at least one interval was active.
  std::uint64_t busy_ns(std::uint64_t begin_ns, std::uint64_t end_ns) const;
  std::uint64_t busy_ns() const { return busy_ns(0, UINT64_MAX); }
  // Returns busy_ns() as a share of the range [begin, end). Returns 0 if the range is empty.
  double share(std::uint64_t begin_ns, std::uint64_t end_ns) const;
  // Returns the average number of active intervals in the range [begin, end).
  // Requires: the set is for kDepth.
  double depth(std::uint64_t begin_ns, std::uint64_t end_ns) const;

  using Interval = std::pair<std::uint64_t, std::uint64_t>;
  // The intervals in order of time. Intervals that touch or overlap are joined.
  const std::vector<Interval>& joined() const { return joined_; }

 private:
  // A sorted list of times. For each time, the struct also has the sum of all earlier times.
  struct Times {
    std::vector<std::uint64_t> at;
    std::vector<double> sum_before;
    void seal();
    // Returns the sum of (time_ns - x) over all times x of `at` that are before `time_ns`.
    double passed(std::uint64_t time_ns) const;
  };

  For use_;
  std::vector<Interval> joined_;
  std::vector<std::uint64_t> busy_before_;  // by joined interval
  Times begins_;
  Times ends_;
};

}  // namespace sluice
