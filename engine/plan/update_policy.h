// This class returns the policy for the update of each step. If optimizer.overlap is "auto", the
// class chooses this policy. The class also computes the clip factor. The choice depends only on
// the config and on the norms so far. So all ranks make the same choice.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstdint>

#include <sluice/config.h>

namespace sluice {

class UpdatePolicy {
 public:
  // `may_be_tentative` says whether storage has shadows for speculation.
  UpdatePolicy(const Config::Optimizer& config, bool may_be_tentative)
      : config_(config), may_be_tentative_(may_be_tentative) {}

  // Returns the policy for the step that is about to begin. The result is never kAuto.
  OverlapPolicy choose() const;
  // The factor by which the gradient is multiplied so that its norm does not exceed clip_norm.
  double clip_factor(double norm) const;
  // Called when a step has ended. `was_clipped` says whether the step's update differed from the
  // update that speculation assumes.
  void note(bool was_clipped) { recent_clips_ = recent_clips_ << 1 | (was_clipped ? 1 : 0); }
  // Called when computation has left its schedule. From now on, it is not certain which gradient of
  // a unit is the last one. An eager update that came too early could not be undone.
  void note_schedule_change() { keeps_schedule_ = false; }

 private:
  // Constant after construction.
  Config::Optimizer config_;
  bool may_be_tentative_;

  // One bit for each of the last 32 steps. At first, all bits are set, as if 32 earlier steps had
  // been clipped.
  std::uint32_t recent_clips_ = ~0u;
  bool keeps_schedule_ = true;
};

}  // namespace sluice
