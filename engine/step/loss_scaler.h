// The scale that a loss is multiplied with so that small gradients survive in fp16, and how it
// moves: halved when a gradient overflows, doubled after a window of steps without. The rule is
// that of DeepSpeed's DynamicLossScaler (its hysteresis lets some overflows pass before the scale
// is halved) and, with a hysteresis of 1 and a minimum of 0, that of PyTorch's GradScaler. The
// state follows from the overflows alone, so ranks that agree about those agree about the scale.
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
  // Goes on from `state`. A static scale stays as it is.
  // Fails with: kInput for a state that no scale that moves can have.
  void restore(const LossScaleState& state);

  // The step's gradients were or were not all finite: the scale for the next step. A static scale
  // stays as it is, whatever the minimum.
  // Fails with: kNonFinite for an overflow at the minimum.
  void update(bool has_overflowed);

 private:
  void lower();

  const LossScaleOptions options_;
  LossScaleState state_;
};

}  // namespace sluice
