#include "engine/plan/update_policy.h"

#include <bit>

namespace sluice {

// A repeated step costs the whole update once more, and speculation saves less than that. So it
// pays while clipping is rare, which is seldom the case early in training.
OverlapPolicy UpdatePolicy::choose() const {
  constexpr int kClipsMax = 1;  // among the last 32 steps
  const bool may_be_eager = config_.clip_norm == 0 && config_.non_finite == NonFinitePolicy::kStop;
  if (config_.overlap == OverlapPolicy::kEager ||
      (config_.overlap == OverlapPolicy::kAuto && may_be_eager))
    return keeps_schedule_ ? OverlapPolicy::kEager : OverlapPolicy::kDeferred;
  if (config_.overlap != OverlapPolicy::kAuto) return config_.overlap;
  return may_be_tentative_ && std::popcount(recent_clips_) <= kClipsMax
             ? OverlapPolicy::kSpeculative
             : OverlapPolicy::kDeferred;
}

double UpdatePolicy::clip_factor(double norm) const {
  const double compared = norm + config_.clip_epsilon;
  return config_.clip_norm > 0 && compared > config_.clip_norm ? config_.clip_norm / compared : 1;
}

}  // namespace sluice
