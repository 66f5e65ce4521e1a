#include "engine/plan/commit_turn.h"

#include <algorithm>

namespace sluice {
namespace {

constexpr double kFlushes = 3;  // one after the other: the data files, then each twin of the record
constexpr double kStepShare = 1.0 / 3;

}  // namespace

std::uint32_t uses_before_commit(const Schedule& schedule, OverlapPolicy policy) {
  if (policy == OverlapPolicy::kSerial) return 0;
  auto turn = std::ranges::find(schedule, Pass::kBackward, &ScheduledUse::pass);
  if (policy == OverlapPolicy::kDeferred) {
    // Backward may run forward again for some units, and use a unit twice.
    for (auto use = turn; use != schedule.end(); ++use)
      if (use->first_gradient) turn = use;
    while (turn != schedule.end() && turn->pass == Pass::kBackward) ++turn;
  }
  return static_cast<std::uint32_t>(turn - schedule.begin());
}

bool commit_may_wait(double flush_s, double step_s) {
  return kFlushes * flush_s <= kStepShare * step_s;
}

}  // namespace sluice
