// The peak memory that one rank has in use in each phase of a step, derived from placement and
// schedule. The result predicts StepReport::buffers. Under the policy "serial", the values are
// exact for state at home, the window, gradients, and pools that count all the time. The values of
// buffers are limits, because their use depends on a run's timing. Under the other policies, the
// values of gradients and shadows are limits, too. Pure.
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
