// The bytes and the workers' times that belong to steps. The traffic of a step includes the rest of
// the update before the step. So the counts of a step include the work between the two steps, but
// not the work of an inference, or of a caller who has borrowed the buffers.
//
// Thread rule: the scheduler's thread calls count_work_before(). The thread of the step loop calls
// the other functions.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <sluice/step_report.h>
#include "engine/plan/traffic.h"
#include "engine/run/scheduler.h"
#include "io/io_queue.h"

namespace sluice {

class StepCounts {
 public:
  // `queue` and `scheduler` must outlive the object.
  StepCounts(const IoQueue& queue, std::size_t drives, Scheduler& scheduler)
      : traffic_(queue, drives), scheduler_(scheduler) {}

  // The work between pause() and resume() counts for no step.
  void pause();
  void resume();
  // Must be called when a step or an inference begins.
  void count_work_before();

  // The traffic of each drive since the last call.
  std::vector<DriveTraffic> take_traffic() { return traffic_.take(); }
  // The workers' times before the step that ends.
  WorkTimes take_work_before() { return std::exchange(work_before_, {}); }

 private:
  TrafficMeter traffic_;
  Scheduler& scheduler_;
  WorkTimes work_before_;
};

}  // namespace sluice
