// The function predicts the peak memory that one rank uses in each phase of a step. The prediction
// is derived from the placement and the schedule. The result predicts StepReport::buffers. Under
// the policy "serial", the values are exact for four kinds of memory: state at home, the window,
// gradients, and pools that always count as full. For buffers, the values are upper limits, because
// the use of buffers depends on timing. Under the other policies, the values for gradients and
// shadows are upper limits, too. The function is pure.
#pragma once

#include <cstdint>

#include "engine/plan/placement.h"
#include "engine/plan/pool_meter.h"
#include "engine/plan/update_policy.h"

namespace sluice {

struct PhaseSubject {
  const ModelSpec& model;  // validated; all referenced objects must outlive the call
  const Layout& layout;
  const Placement& placement;
  OverlapPolicy policy{};
  std::uint32_t micro_batches = 1;
  MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  std::uint32_t ranks = 1;
};

PhaseMarks predicted_marks(const PhaseSubject& subject);

}  // namespace sluice
