// The scale by which a loss is multiplied so that small gradients survive in fp16. The scale is
// halved when a gradient overflows, and doubled after a window of steps without overflow. The rule
// is that of DeepSpeed's DynamicLossScaler until June 2025. Versions since then double the scale
// one step later. The hysteresis is the number of overflows after which the scale is halved. With a
// hysteresis of 1 and a minimum of 0, the rule is the same as in PyTorch's GradScaler. The state
// depends only on the overflows. So ranks with the same overflows have the same scale.
//
// Thread rule: one thread at a time.
// Invariants: the scale is finite and positive in fp32.
#pragma once

#include <cstdint>

#include <sluice/config.h>
#include <sluice/state_source.h>

namespace sluice {

class LossScaler {
 public:
  explicit LossScaler(const LossScaleOptions& options);

  double scale() const { return state_.scale; }
  const LossScaleState& state() const { return state_; }
  // The scaler continues from `state`. A static scale stays as it is.
  // Fails with kInput if no dynamic scale can have this state.
  void restore(const LossScaleState& state);

  // Computes the scale for the next step. `has_overflowed` says whether a gradient of this step was
  // not finite. A static scale stays as it is.
  // Fails with kNonFinite if a gradient overflows while the scale is at the minimum.
  void update(bool has_overflowed);

 private:
  void lower();

  const LossScaleOptions options_;
  LossScaleState state_;
};

}  // namespace sluice
