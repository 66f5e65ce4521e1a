// Spans of time laid over each other: how long at least one of them lasted, and how many there were
// at once, in any stretch of time.
//
// Thread rule: add(), then seal(), then questions from any thread.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace sluice {

class IntervalSet {
 public:
  // kDepth: depth() will be asked for, which takes 32 bytes an interval; without it, intervals that
  // come in order of time take next to nothing.
  enum class For : std::uint8_t { kBusy, kDepth };
  explicit IntervalSet(For use = For::kBusy) : use_(use) {}

  // [begin, end); nothing when it is empty.
  void add(std::uint64_t begin_ns, std::uint64_t end_ns);
  // No more will be added.
  void seal();

  // How much of [begin, end) lies in some interval.
  std::uint64_t busy_ns(std::uint64_t begin_ns, std::uint64_t end_ns) const;
  std::uint64_t busy_ns() const { return busy_ns(0, UINT64_MAX); }
  // The share of [begin, end) that does; 0 of nothing.
  double share(std::uint64_t begin_ns, std::uint64_t end_ns) const;
  // How many intervals there are at once, on the average over [begin, end).
  // Requires: kDepth.
  double depth(std::uint64_t begin_ns, std::uint64_t end_ns) const;

  using Interval = std::pair<std::uint64_t, std::uint64_t>;
  // Those that touch or overlap joined, in order of time.
  const std::vector<Interval>& joined() const { return joined_; }

 private:
  // Sorted times with the sums of all before each.
  struct Times {
    std::vector<std::uint64_t> at;
    std::vector<double> sum_before;
    void seal();
    // Sum of (time - at) over all that are before `time`.
    double passed(std::uint64_t time_ns) const;
  };

  For use_;
  std::vector<Interval> joined_;
  std::vector<std::uint64_t> busy_before_;  // by joined interval
  Times begins_;
  Times ends_;
};

}  // namespace sluice
