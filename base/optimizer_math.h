// The optimizers' formulas. Each function makes one step for one parameter. These functions define
// the result. The SIMD and CUDA versions must give the same bits. Every operation is a separate
// IEEE multiplication, addition, division or square root in fp32. Operations are never fused,
// because the whole project is compiled with -ffp-contract=off. The functions are pure, and any
// thread may call them.
#pragma once

#include <cmath>
#include <cstdint>

#include <sluice/device_function.h>
#include <sluice/dtype.h>
#include <sluice/optimizer.h>

namespace sluice {

// An fp32 master weight, split into a bf16 compute parameter (`high`) and a signed 16-bit
// remainder. `high` is the master, rounded to bf16 with ties away from zero. A rounding with ties
// away from zero can be undone, because the remainder's sign says on which side of `high` the
// master lies. A rounding with ties to even could not be undone.
//   0x3f80_8000 -> high 0x3f81, low -0x8000;  back: 0x3f81_0000 - 0x8000 = 0x3f80_8000.
// If a finite master's magnitude has the bits 0x7f7f8000 or more, `high` is infinite. A rounding
// with ties to even would make `high` infinite, too. NaN is handled separately, because otherwise
// the split would turn 65,536 NaN patterns into zeros. A signalling NaN becomes quiet.
struct SplitMaster {
  std::uint16_t high;
  std::int16_t low;
};

SLUICE_HOST_DEVICE inline SplitMaster split_master(float master) {
  const std::uint32_t bits = bits_from_float(master);
  std::uint32_t high = bits >> 16;
  const std::uint16_t low = static_cast<std::uint16_t>(bits & 0xffffu);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    high |= 0x0040u;
  } else if (low >= 0x8000u) {
    high += 1;
  }
  return {static_cast<std::uint16_t>(high), static_cast<std::int16_t>(low)};
}

SLUICE_HOST_DEVICE inline float join_master(SplitMaster split) {
  const std::uint32_t high = static_cast<std::uint32_t>(split.high) << 16;
  if ((split.high & 0x7fffu) > 0x7f80u)
    return float_from_bits(high | static_cast<std::uint16_t>(split.low));
  return float_from_bits(high + static_cast<std::uint32_t>(static_cast<std::int32_t>(split.low)));
}

// The coefficients of one step. Each coefficient is rounded once from double to fp32. The function
// adam_coefficients() computes the coefficients.
struct AdamCoefficients {
  float gradient_scale;  // clip factor / (loss scale * micro-batches * ranks)
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inverse_sqrt_correction2;  // 1 / sqrt(1 - beta2^step)
  float epsilon;
  float decay_factor;  // 1 - learning_rate * weight_decay; exactly 1 without decay
  float step_size;     // learning_rate / (1 - beta1^step)
};

// The state of one element. An optimizer with only one moment leaves the other moment unchanged.
struct AdamElement {
  float master;
  float exp_avg;
  float exp_avg_sq;
};

// Applies Adam or AdamW to one element whose gradient is already scaled.
SLUICE_HOST_DEVICE inline AdamElement adam_with_scaled_gradient(const AdamCoefficients& c,
                                                                AdamElement state, float g) {
  const float exp_avg = c.beta1 * state.exp_avg + c.one_minus_beta1 * g;
  const float exp_avg_sq = c.beta2 * state.exp_avg_sq + (c.one_minus_beta2 * g) * g;
  const float denominator = sqrtf(exp_avg_sq) * c.inverse_sqrt_correction2 + c.epsilon;
  const float master = state.master * c.decay_factor - c.step_size * (exp_avg / denominator);
  return {master, exp_avg, exp_avg_sq};
}

// AdamW, one element, one step:
//   g = gradient * gradient_scale;  m = beta1*m + (1-beta1)*g;  v = beta2*v + ((1-beta2)*g)*g;
//   p = p*decay_factor - step_size * (m / (sqrt(v) * inverse_sqrt_correction2 + epsilon))
SLUICE_HOST_DEVICE inline AdamElement adam_element(const AdamCoefficients& c, AdamElement state,
                                                   float gradient) {
  return adam_with_scaled_gradient(c, state, gradient * c.gradient_scale);
}

// Adam with L2 regularization is the same as AdamW without decay, but uses this gradient:
//   g = gradient * gradient_scale + l2 * p
struct AdamL2Coefficients {
  AdamCoefficients adam;  // with a decay_factor of exactly 1
  float l2;
};

SLUICE_HOST_DEVICE inline AdamElement adam_l2_element(const AdamL2Coefficients& c,
                                                      AdamElement state, float gradient) {
  return adam_with_scaled_gradient(c.adam, state,
                                   gradient * c.adam.gradient_scale + c.l2 * state.master);
}

// Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2) with
// decoupled decay. Lion keeps only exp_avg.
struct LionOptions {
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0.01;
};

struct LionCoefficients {
  float gradient_scale;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float decay_factor;
  float learning_rate;
};

//   g = gradient * gradient_scale;  c = beta1*m + (1-beta1)*g;  m = beta2*m + (1-beta2)*g;
//   p = p*decay_factor - learning_rate * sign(c), where sign(0) is 0 and sign(NaN) is NaN
SLUICE_HOST_DEVICE inline AdamElement lion_element(const LionCoefficients& c, AdamElement state,
                                                   float gradient) {
  const float g = gradient * c.gradient_scale;
  const float direction = c.beta1 * state.exp_avg + c.one_minus_beta1 * g;
  const float exp_avg = c.beta2 * state.exp_avg + c.one_minus_beta2 * g;
  float move = direction;  // a zero or a NaN
  if (direction > 0) move = c.learning_rate;
  if (direction < 0) move = -c.learning_rate;
  return {state.master * c.decay_factor - move, exp_avg, state.exp_avg_sq};
}

// Adagrad (Duchi, Hazan & Singer 2011, diagonal form) with decay as an L2 term. Adagrad keeps only
// exp_avg_sq, which holds the plain sum of the squared gradients.
struct AdagradOptions {
  double epsilon = 1e-10;
  double weight_decay = 0.0;
};

struct AdagradCoefficients {
  float gradient_scale;
  float l2;
  float epsilon;
  float learning_rate;
};

//   g = gradient * gradient_scale + l2 * p;  v = v + g*g;
//   p = p - learning_rate * (g / (sqrt(v) + epsilon))
SLUICE_HOST_DEVICE inline AdamElement adagrad_element(const AdagradCoefficients& c,
                                                      AdamElement state, float gradient) {
  const float g = gradient * c.gradient_scale + c.l2 * state.master;
  const float sum = state.exp_avg_sq + g * g;
  const float master = state.master - c.learning_rate * (g / (sqrtf(sum) + c.epsilon));
  return {master, state.exp_avg, sum};
}

// Stochastic gradient descent with momentum (Polyak 1964) and with decay as an L2 term. The formula
// is that of Sutskever et al. 2013, except that the momentum does not contain the learning rate.
// SGD keeps only exp_avg, which holds the momentum.
struct SgdOptions {
  double momentum = 0.9;
  double weight_decay = 0.0;
};

struct SgdCoefficients {
  float gradient_scale;
  float l2;
  float momentum;
  float learning_rate;
};

//   g = gradient * gradient_scale + l2 * p;  m = momentum*m + g;  p = p - learning_rate * m
// With a momentum of 0, p moves by g, and m is neither read nor changed. An infinity in m would
// otherwise make every later p NaN, since 0 times infinity is NaN.
SLUICE_HOST_DEVICE inline AdamElement sgd_element(const SgdCoefficients& c, AdamElement state,
                                                  float gradient) {
  const bool is_plain = c.momentum == 0.0f;
  const float g = gradient * c.gradient_scale + c.l2 * state.master;
  const float direction = (is_plain ? 0.0f : c.momentum * state.exp_avg) + g;
  return {state.master - c.learning_rate * direction, is_plain ? state.exp_avg : direction,
          state.exp_avg_sq};
}

// Computes base^exponent in double by repeated squaring. So a resumed run gets the same bits as an
// uninterrupted run. A running product in fp32 would give other bits. The C library's pow is not
// used, because its last bit differs between C libraries.
inline double power(double base, std::uint64_t exponent) {
  double result = 1.0;
  for (double square = base; exponent != 0; exponent >>= 1, square *= square) {
    if (exponent & 1) result *= square;
  }
  return result;
}

// The coefficients of step number `step`. The first step is step 1. Requires: step >= 1, 0 <= beta
// < 1.
inline AdamCoefficients adam_coefficients(const AdamOptions& options, double learning_rate,
                                          std::uint64_t step, float gradient_scale) {
  const double correction1 = 1.0 - power(options.beta1, step);
  const double correction2 = 1.0 - power(options.beta2, step);
  return {.gradient_scale = gradient_scale,
          .beta1 = static_cast<float>(options.beta1),
          .one_minus_beta1 = static_cast<float>(1.0 - options.beta1),
          .beta2 = static_cast<float>(options.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - options.beta2),
          .inverse_sqrt_correction2 = static_cast<float>(1.0 / std::sqrt(correction2)),
          .epsilon = static_cast<float>(options.epsilon),
          .decay_factor = static_cast<float>(1.0 - learning_rate * options.weight_decay),
          .step_size = static_cast<float>(learning_rate / correction1)};
}

inline AdamL2Coefficients adam_l2_coefficients(const AdamOptions& options, double learning_rate,
                                               std::uint64_t step, float gradient_scale) {
  AdamOptions without_decay = options;
  without_decay.weight_decay = 0;
  return {.adam = adam_coefficients(without_decay, learning_rate, step, gradient_scale),
          .l2 = static_cast<float>(options.weight_decay)};
}

// Lion, Adagrad and SGD have no bias correction, so their coefficients do not depend on the step.
inline LionCoefficients lion_coefficients(const LionOptions& options, double learning_rate,
                                          float gradient_scale) {
  return {.gradient_scale = gradient_scale,
          .beta1 = static_cast<float>(options.beta1),
          .one_minus_beta1 = static_cast<float>(1.0 - options.beta1),
          .beta2 = static_cast<float>(options.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - options.beta2),
          .decay_factor = static_cast<float>(1.0 - learning_rate * options.weight_decay),
          .learning_rate = static_cast<float>(learning_rate)};
}

inline AdagradCoefficients adagrad_coefficients(const AdagradOptions& options, double learning_rate,
                                                float gradient_scale) {
  return {.gradient_scale = gradient_scale,
          .l2 = static_cast<float>(options.weight_decay),
          .epsilon = static_cast<float>(options.epsilon),
          .learning_rate = static_cast<float>(learning_rate)};
}

inline SgdCoefficients sgd_coefficients(const SgdOptions& options, double learning_rate,
                                        float gradient_scale) {
  return {.gradient_scale = gradient_scale,
          .l2 = static_cast<float>(options.weight_decay),
          .momentum = static_cast<float>(options.momentum),
          .learning_rate = static_cast<float>(learning_rate)};
}

}  // namespace sluice
