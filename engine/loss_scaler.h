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

namespace sluice {

struct LossScaleOptions {
  // The scale of every step; 0 = it moves, by what follows.
  double static_scale = 0;
  std::uint32_t initial_scale_power = 16;  // it starts at two to the power of this; 0..31
  // Steps without overflow before it doubles. Small: more steps are lost by trying; large: small
  // gradients are lost for longer.
  std::uint32_t window = 1000;
  // Overflows before it is halved, the last of them included. At least 1.
  std::uint32_t hysteresis = 2;
  // An overflow that was let pass is forgotten by the next step without one; else only when the
  // scale doubles.
  bool consecutive_hysteresis = false;
  // It is not halved below; an overflow there ends the run. 0 = no bound.
  double minimum = 1;
};

class LossScaler {
 public:
  explicit LossScaler(const LossScaleOptions& options);

  double scale() const { return scale_; }

  // The step's gradients were or were not all finite: the scale for the next step.
  // Fails with: kNonFinite for an overflow at the minimum, or under a static scale below it.
  void update(bool has_overflowed);

 private:
  void lower();

  const LossScaleOptions options_;
  double scale_;
  std::uint32_t hysteresis_left_;
  std::uint32_t good_steps_ = 0;  // since the last overflow or doubling
};

}  // namespace sluice
