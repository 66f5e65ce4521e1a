// How long something other than computation has been at work: storage, copies to the device and the
// processor, each, and all of them together, as the time during which at least one task was under
// way: from when it is asked for until the scheduler hears of its end, hand-overs between threads
// included.
//
// Thread rule: scheduler's thread only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sluice {

enum class Work : std::uint8_t { kStorage, kCopyUp, kCpu };
inline constexpr std::size_t kWorkCount = 3;

struct WorkTimes {
  std::array<std::int64_t, kWorkCount> busy_ns{};  // by Work
  std::int64_t any_ns = 0;

  std::int64_t busy(Work work) const { return busy_ns[static_cast<std::size_t>(work)]; }
};

class WorkMeter {
 public:
  // A task of this kind begins, or ends.
  void begin(Work work);
  void end(Work work);

  // Since the last call.
  WorkTimes take();

 private:
  struct Line {
    std::uint64_t under_way = 0;
    std::uint64_t since_ns = 0;  // while under_way != 0
    std::int64_t busy_ns = 0;

    void begin(std::uint64_t now_ns);
    void end(std::uint64_t now_ns);
    std::int64_t take(std::uint64_t now_ns);
  };

  Line any_;
  std::array<Line, kWorkCount> lines_;
};

}  // namespace sluice
