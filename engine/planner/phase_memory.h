// What one rank has in use at most in each phase of a step, as a placement and a schedule make it:
// the prediction of StepReport::buffers. State at home, the window, gradients and what counts for
// good are exact under the policy "serial"; buffers, and under the other policies gradients and
// shadows, are limits, since how much of them is in use at once depends on a run's timing. Pure.
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
