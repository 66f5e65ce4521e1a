// The bytes that one step moves between host and storage, known before it runs: what the window
// plan fetches, and what the optimizer pass reads and writes. Pure; the run checks itself against
// it.
#pragma once

#include <cstdint>

#include "engine/layout.h"
#include "engine/placement.h"
#include "engine/window_plan.h"

namespace sluice {

struct Traffic {
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_write_bytes = 0;
  // Under overlap, reads may be fewer: as far as parameter slots keep what the update wants after
  // backward, or the next forward after the update. Serial: the same as nvme_read_bytes.
  std::uint64_t nvme_read_bytes_least = 0;
};

// Storage bytes of the parameters of `unit` that are homed there.
std::uint64_t nvme_parameter_bytes(const Layout& layout, const Placement& placement, UnitId unit);

// One step: every fetch of `plan`, and each block's state once in and once out. A speculative step
// that is redone adds the latter once more.
Traffic predict_step_traffic(const Layout& layout, const Placement& placement,
                             const Schedule& schedule, const WindowPlan& plan);

}  // namespace sluice
