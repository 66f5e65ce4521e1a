// The parts of a step's time.
#include <algorithm>

#include <sluice/step_report.h>
#include "engine/run/step_timeline.h"

namespace sluice {

Blame blame_of(TraceReason reason) {
  switch (reason) {
    case TraceReason::kRead:
    case TraceReason::kSlot:
    case TraceReason::kWindow:
    case TraceReason::kCopy:
    case TraceReason::kGradientSlot:
    case TraceReason::kGradientCopy:
    case TraceReason::kGradientSpill:
    case TraceReason::kCollective:
    case TraceReason::kActivation:
    case TraceReason::kCommit:
    case TraceReason::kAnnounce:
    case TraceReason::kSchedule: return Blame::kIo;
    case TraceReason::kUpdateRead:
    case TraceReason::kUpdateLane:
    case TraceReason::kUpdate:
    case TraceReason::kUpdateWrite:
    case TraceReason::kSave:
    case TraceReason::kNorm: return Blame::kOptimizer;
    case TraceReason::kNone: return Blame::kOther;
  }
  return Blame::kOther;
}

std::int64_t StepTimes::hidden_ns() const {
  const std::int64_t for_ranks_ns = wait_ns[static_cast<std::size_t>(TraceReason::kCollective)] +
                                    wait_ns[static_cast<std::size_t>(TraceReason::kAnnounce)];
  return std::clamp<std::int64_t>(work.any_ns - (exposed_ns() - for_ranks_ns), 0,
                                  std::max<std::int64_t>(0, work.any_ns));
}

double StepTimes::hidden_share() const {
  return work.any_ns <= 0 ? 1 : static_cast<double>(hidden_ns()) / static_cast<double>(work.any_ns);
}

}  // namespace sluice
