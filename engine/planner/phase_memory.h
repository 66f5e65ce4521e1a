// The most that one rank has in use in each phase of a step, derived from placement and schedule:
// the prediction of StepReport::buffers. State at home, the window, gradients and pools that count
// all the time are exact under the policy "serial". Buffers, and under the other policies gradients
// and shadows, are limits, since their use at any one time depends on a run's timing. Pure.
#pragma once

#include <cstdint>

#include "engine/plan/placement.h"
#include "engine/plan/pool_meter.h"
#include "engine/plan/update_policy.h"

namespace sluice {

struct PhaseSubject {
  const ModelSpec& model;  // validated; all must outlive the call
  const Layout& layout;
  const Placement& placement;
  OverlapPolicy policy{};
  std::uint32_t micro_batches = 1;
  MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  std::uint32_t ranks = 1;
};

PhaseMarks predicted_marks(const PhaseSubject& subject);

}  // namespace sluice
