// The meter measures how long workers have been busy. The workers are storage, copies to the
// device, and the processor. The meter measures the busy time of each worker, and the time for
// which at least one worker was busy. A worker is busy while at least one task is under way. A task
// is under way from its request until the scheduler learns that the task has ended. So the time of
// a task includes hand-overs between threads.
//
// Thread rule: only the scheduler's thread may use the meter.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <sluice/step_report.h>

namespace sluice {

class WorkMeter {
 public:
  // begin() is called when a task of this kind has begun. end() is called when the task has ended.
  void begin(Work work);
  void end(Work work);

  // Returns the busy times since the last call of take().
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
