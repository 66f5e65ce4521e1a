#include "engine/update_policy.h"

#include <bit>

namespace sluice {

// A step made again costs the whole update once more, and speculation saves less than that: it pays
// while clipping is rare. Early in training it seldom is.
OverlapPolicy UpdatePolicy::choose() const {
  constexpr int kClipsMax = 1;  // among the last 32 steps
  if (config_.overlap != OverlapPolicy::kAuto) return config_.overlap;
  if (config_.clip_norm == 0 && config_.non_finite == NonFinitePolicy::kStop)
    return OverlapPolicy::kEager;
  return may_be_tentative_ && std::popcount(recent_clips_) <= kClipsMax
             ? OverlapPolicy::kSpeculative
             : OverlapPolicy::kDeferred;
}

double UpdatePolicy::clip_factor(double norm) const {
  return config_.clip_norm > 0 && norm > config_.clip_norm ? config_.clip_norm / norm : 1;
}

StepCoefficients UpdatePolicy::coefficients(std::uint64_t step, double learning_rate,
                                            double clip_factor, std::uint32_t micro_batches) const {
  const OptimizerOptions decayed = config_.options();
  OptimizerOptions plain = decayed;
  plain.adam.weight_decay = 0;
  const auto scale = static_cast<float>(clip_factor / micro_batches);
  return {.decayed = coefficients_of(decayed, learning_rate, step, scale),
          .plain = coefficients_of(plain, learning_rate, step, scale)};
}

}  // namespace sluice
