// The formulas of base/optimizer_math.h in fp64, for one element. Each fp64 value has a bound on
// the distance between this value and the fp32 result. In numerical analysis, this bound is called
// a running error bound (Higham, "Accuracy and Stability of Numerical Algorithms", 3.3). Every fp32
// operation adds an error of at most half a unit in the last place of the result. This error is
// kUnit times the result's magnitude, or half of the smallest denormal number. The operation
// determines how the errors of the operands propagate. The coefficients have fp32 values. So the
// bound covers only the arithmetic. The bound does not cover the fp32 rounding of a coefficient
// such as 0.999.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/optimizer_math.h"

namespace sluice {

// A value in fp64, and the largest possible error of the corresponding fp32 value.
struct Bounded {
  double value = 0;
  double error = 0;

  double largest() const { return std::fabs(value) + error; }
};

inline constexpr double kUnit = 0x1p-24;        // the relative error of one rounding
inline constexpr double kUnderflow = 0x1p-150;  // the absolute error of one rounding near zero

// The rounded result of one operation. The factor (1 + 2^-20) covers the products of small terms.
inline Bounded rounded(double value, double error) {
  return {value, (error + kUnit * (std::fabs(value) + error) + kUnderflow) * (1 + 0x1p-20)};
}

inline Bounded operator*(double exact, Bounded b) {
  return rounded(exact * b.value, std::fabs(exact) * b.error);
}
inline Bounded operator*(Bounded a, Bounded b) {
  return rounded(a.value * b.value,
                 std::fabs(a.value) * b.error + std::fabs(b.value) * a.error + a.error * b.error);
}
inline Bounded operator+(Bounded a, Bounded b) {
  return rounded(a.value + b.value, a.error + b.error);
}
inline Bounded operator-(Bounded a, Bounded b) {
  return rounded(a.value - b.value, a.error + b.error);
}
// The error is infinite if the divisor may be 0.
inline Bounded operator/(Bounded a, Bounded b) {
  const double quotient = a.value / b.value;
  const double least = std::fabs(b.value) - b.error;
  if (!(least > 0)) return {quotient, std::numeric_limits<double>::infinity()};
  return rounded(quotient, (a.error + std::fabs(quotient) * b.error) / least);
}
// |sqrt(x + e) - sqrt(x)| is at most sqrt(e), and at most e / sqrt(x).
inline Bounded root(Bounded a) {
  const double value = std::sqrt(a.value);
  const double error = std::sqrt(a.error);
  return rounded(value, value > error ? a.error / value : error);
}

struct BoundedElement {
  Bounded p, m, v;
  double largest = 0;     // the largest |p| so far
  double absolute_m = 0;  // exp_avg of |g|, which has no cancellation
  // These members are terms of AdamW's closed form (docs/architecture.md). The unit of
  // weight_roundings is one unit in the last place of `largest`.
  double weight_roundings = 0;
  double updates = 0;  // sum of (3 t + 9) U_t

  void note_weight() { largest = std::max(largest, p.largest()); }
};

inline void adam_with_gradient(const AdamCoefficients& c, BoundedElement& e, Bounded g,
                               double step) {
  e.absolute_m = double{c.beta1} * e.absolute_m + double{c.one_minus_beta1} * std::fabs(g.value);
  e.m = double{c.beta1} * e.m + double{c.one_minus_beta1} * g;
  e.v = double{c.beta2} * e.v + (double{c.one_minus_beta2} * g) * g;
  const Bounded denominator =
      double{c.inverse_sqrt_correction2} * root(e.v) + Bounded{double{c.epsilon}};
  const Bounded kept = c.decay_factor == 1 ? e.p : double{c.decay_factor} * e.p;
  e.p = kept - double{c.step_size} * (e.m / denominator);
  e.weight_roundings += c.decay_factor == 1 ? 0.5 : 1;
  e.updates += (3 * step + 9) * double{c.step_size} * e.absolute_m / denominator.value;
  e.note_weight();
}
inline void bounded_step(const AdamCoefficients& c, BoundedElement& e, double gradient,
                         double step) {
  adam_with_gradient(c, e, double{c.gradient_scale} * Bounded{gradient}, step);
}
inline void bounded_step(const AdamL2Coefficients& c, BoundedElement& e, double gradient,
                         double step) {
  adam_with_gradient(c.adam, e,
                     double{c.adam.gradient_scale} * Bounded{gradient} + double{c.l2} * e.p, step);
}
// The sign is certain if the error of the direction is smaller than the magnitude of the direction.
inline void bounded_step(const LionCoefficients& c, BoundedElement& e, double gradient, double) {
  const Bounded g = double{c.gradient_scale} * Bounded{gradient};
  const Bounded direction = double{c.beta1} * e.m + double{c.one_minus_beta1} * g;
  const bool is_certain = std::fabs(direction.value) > direction.error || direction.largest() == 0;
  e.m = double{c.beta2} * e.m + double{c.one_minus_beta2} * g;
  const double sign = (direction.value > 0) - (direction.value < 0);
  const double rate = double{c.learning_rate};
  e.p = double{c.decay_factor} * e.p - Bounded{rate * sign, is_certain ? 0 : 2 * rate};
  e.note_weight();
}
inline void bounded_step(const AdagradCoefficients& c, BoundedElement& e, double gradient, double) {
  const Bounded g = double{c.gradient_scale} * Bounded{gradient} + double{c.l2} * e.p;
  e.v = e.v + g * g;
  e.p = e.p - double{c.learning_rate} * (g / (root(e.v) + Bounded{double{c.epsilon}}));
  e.note_weight();
}
inline void bounded_step(const SgdCoefficients& c, BoundedElement& e, double gradient, double) {
  const Bounded g = double{c.gradient_scale} * Bounded{gradient} + double{c.l2} * e.p;
  e.m = double{c.momentum} * e.m + g;
  e.p = e.p - double{c.learning_rate} * e.m;
  e.note_weight();
}

}  // namespace sluice
