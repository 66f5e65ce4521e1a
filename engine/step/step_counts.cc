#include "engine/step/step_counts.h"

namespace sluice {

void StepCounts::pause() {
  scheduler_.run([this] { count_work_before(); });
  traffic_.pause();
}

void StepCounts::resume() {
  traffic_.resume();
  scheduler_.run([this] { (void)scheduler_.work().take(); });
}

void StepCounts::count_work_before() {
  const WorkTimes work = scheduler_.work().take();
  for (std::size_t i = 0; i < kWorkCount; ++i) work_before_.busy_ns[i] += work.busy_ns[i];
  work_before_.any_ns += work.any_ns;
}

}  // namespace sluice
