#include "tools/gpt/model/row_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include <sluice/dtype.h>

// One source, compiled for several instruction sets and chosen when the program is loaded. The
// sanitizers cannot run inside the loader, so they get the plain version.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define SLUICE_ROW_KERNEL \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SLUICE_ROW_KERNEL
#endif
#define SLUICE_INLINE inline __attribute__((always_inline))

namespace sluice::gpt {
namespace {

constexpr std::uint64_t kLanes = 16;
constexpr std::uint64_t kBlockRows = 64;
constexpr float kNormEpsilon = 1e-5f;

// condition ? yes : no as bit operations: the compiler turns the operator into branches, and a loop
// with branches does not vectorize.
SLUICE_INLINE std::uint32_t selected(bool condition, std::uint32_t yes, std::uint32_t no) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}
SLUICE_INLINE float selected(bool condition, float yes, float no) {
  return float_from_bits(selected(condition, bits_from_float(yes), bits_from_float(no)));
}

// exp(x) within 2 units in the last place for x in [-87, 88], clamped to that range: x = n ln 2 + r
// with |r| <= ln(2) / 2, exp(r) by the polynomial of Cephes (Moshier), 2^n by its exponent bits.
// No branch and no table, so that it vectorizes. NaN stays NaN.
SLUICE_INLINE float exp_of(float x) {
  x = selected(x < -87.0f, -87.0f, x);
  x = selected(x > 88.0f, 88.0f, x);
  // Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the mantissa.
  constexpr float kShift = 12582912.0f;
  const float shifted = x * 1.44269504088896341f + kShift;
  const float n = shifted - kShift;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  const std::uint32_t exponent = (bits_from_float(shifted) + 127u) << 23;
  return p * float_from_bits(exponent);
}

struct Lanes {
  float value[kLanes] = {};
};

// The tree of the 16 lanes: i + (i + 8), then + 4, + 2, + 1.
SLUICE_INLINE float sum_of(Lanes& lanes) {
  for (std::uint64_t half = kLanes / 2; half != 0; half /= 2)
    for (std::uint64_t i = 0; i < half; ++i) lanes.value[i] += lanes.value[i + half];
  return lanes.value[0];
}

// sum(term(i)) for i in [0, count): element i goes to lane i % 16.
template <class Term>
SLUICE_INLINE float lane_sum(std::uint64_t count, const Term& term) {
  Lanes lanes;
  std::uint64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::uint64_t lane = 0; lane < kLanes; ++lane) lanes.value[lane] += term(i + lane);
  for (std::uint64_t lane = 0; i + lane < count; ++lane) lanes.value[lane] += term(i + lane);
  return sum_of(lanes);
}

SLUICE_INLINE float max_of(const float* x, std::uint64_t count) {
  Lanes lanes;
  for (float& lane : lanes.value) lane = x[0];
  std::uint64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::uint64_t lane = 0; lane < kLanes; ++lane)
      lanes.value[lane] = lanes.value[lane] < x[i + lane] ? x[i + lane] : lanes.value[lane];
  for (; i < count; ++i) lanes.value[0] = lanes.value[0] < x[i] ? x[i] : lanes.value[0];
  return *std::max_element(lanes.value, lanes.value + kLanes);
}

constexpr float kGeluScale = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;

}  // namespace

SLUICE_ROW_KERNEL void gelu_row(const float* x, float* y, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const float v = x[i];
    const float two_u = kGeluScale * (v + kGeluCubic * (v * v * v));
    y[i] = v / (1.0f + exp_of(-two_u));
  }
}

SLUICE_ROW_KERNEL void gelu_backward_row(const float* x, float* gradient, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const float v = x[i];
    const float two_u = kGeluScale * (v + kGeluCubic * (v * v * v));
    const float two_du = kGeluScale * (1.0f + (3.0f * kGeluCubic) * (v * v));
    // y = v s(2u): y' = s + v s (1 - s) (2u)'. With e = exp(-2u), 1 - s = e s has no cancellation.
    const float e = exp_of(-two_u);
    const float s = 1.0f / (1.0f + e);
    gradient[i] *= s + v * s * (e * s) * two_du;
  }
}

SLUICE_ROW_KERNEL RowMoments layer_norm_row(const float* x, const float* weight, const float* bias,
                                            float* y, std::uint64_t count) {
  const float inverse_count = 1.0f / static_cast<float>(count);
  const float mean = lane_sum(count, [&](std::uint64_t i) { return x[i]; }) * inverse_count;
  const float variance =
      lane_sum(count, [&](std::uint64_t i) { return (x[i] - mean) * (x[i] - mean); }) *
      inverse_count;
  const float inverse_deviation = 1.0f / std::sqrt(variance + kNormEpsilon);
  for (std::uint64_t i = 0; i < count; ++i)
    y[i] = (x[i] - mean) * inverse_deviation * weight[i] + bias[i];
  return {mean, inverse_deviation};
}

SLUICE_ROW_KERNEL void layer_norm_backward_row(const float* x, RowMoments moments,
                                               const float* weight, const float* dy, float* dx,
                                               std::uint64_t count, Into into) {
  const float mean = moments.mean;
  const float scale = moments.inverse_deviation;
  const float inverse_count = 1.0f / static_cast<float>(count);
  const float g_mean =
      lane_sum(count, [&](std::uint64_t i) { return dy[i] * weight[i]; }) * inverse_count;
  const float gx_mean =
      lane_sum(count,
               [&](std::uint64_t i) { return dy[i] * weight[i] * ((x[i] - mean) * scale); }) *
      inverse_count;
  if (into == Into::kAccumulate) {
    for (std::uint64_t i = 0; i < count; ++i)
      dx[i] += scale * ((dy[i] * weight[i] - g_mean) - (x[i] - mean) * scale * gx_mean);
  } else {
    for (std::uint64_t i = 0; i < count; ++i)
      dx[i] = scale * ((dy[i] * weight[i] - g_mean) - (x[i] - mean) * scale * gx_mean);
  }
}

SLUICE_ROW_KERNEL float softmax_row(float* scores, float scale, std::uint64_t count) {
  const float max = max_of(scores, count);
  for (std::uint64_t i = 0; i < count; ++i) scores[i] = exp_of(scale * (scores[i] - max));
  const float sum = lane_sum(count, [&](std::uint64_t i) { return scores[i]; });
  const float inverse = 1.0f / sum;
  for (std::uint64_t i = 0; i < count; ++i) scores[i] *= inverse;
  return scale * max + std::log(sum);
}

SLUICE_ROW_KERNEL void softmax_backward_row(float* scores, float* gradient, float scale,
                                            float log_sum, float delta, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const float p = exp_of(scale * scores[i] - log_sum);
    scores[i] = p;
    gradient[i] = p * (gradient[i] - delta) * scale;
  }
}

SLUICE_ROW_KERNEL float cross_entropy_row(const float* logits, std::uint64_t count,
                                          std::uint64_t target) {
  const float max = max_of(logits, count);
  const float sum = lane_sum(count, [&](std::uint64_t i) { return exp_of(logits[i] - max); });
  return std::log(sum) - (logits[target] - max);
}

SLUICE_ROW_KERNEL float cross_entropy_gradient_row(float* logits, std::uint64_t count,
                                                   std::uint64_t target, float scale) {
  const float max = max_of(logits, count);
  const float target_logit = logits[target] - max;
  for (std::uint64_t i = 0; i < count; ++i) logits[i] = exp_of(logits[i] - max);
  const float sum = lane_sum(count, [&](std::uint64_t i) { return logits[i]; });
  // p - 1 of a target that is nearly certain, without cancellation: minus the sum of the others.
  const float target_exp = logits[target];
  logits[target] = 0.0f;
  const float others = lane_sum(count, [&](std::uint64_t i) { return logits[i]; });
  const float factor = scale / (others + target_exp);
  for (std::uint64_t i = 0; i < count; ++i) logits[i] *= factor;
  logits[target] = -others * factor;
  return std::log(sum) - target_logit;
}

SLUICE_ROW_KERNEL float dot_row(const float* a, const float* b, std::uint64_t count) {
  return lane_sum(count, [&](std::uint64_t i) { return a[i] * b[i]; });
}

SLUICE_ROW_KERNEL void add_row(float* target, const float* source, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) target[i] += source[i];
}

SLUICE_ROW_KERNEL void column_sums(const float* rows, std::uint64_t row_count, std::uint64_t stride,
                                   std::uint64_t column_count, float* sums) {
  float total[kColumnSliceMax] = {};
  for (std::uint64_t begin = 0; begin < row_count; begin += kBlockRows) {
    const std::uint64_t end = std::min(row_count, begin + kBlockRows);
    float block[kColumnSliceMax] = {};
    for (std::uint64_t row = begin; row < end; ++row)
      for (std::uint64_t j = 0; j < column_count; ++j) block[j] += rows[row * stride + j];
    for (std::uint64_t j = 0; j < column_count; ++j) total[j] += block[j];
  }
  for (std::uint64_t j = 0; j < column_count; ++j) sums[j] = total[j];
}

SLUICE_ROW_KERNEL void layer_norm_parameter_sums(const float* x, const RowMoments* moments,
                                                 const float* dy, std::uint64_t row_count,
                                                 std::uint64_t stride, std::uint64_t column_count,
                                                 float* weight, float* bias) {
  float weight_total[kColumnSliceMax] = {};
  float bias_total[kColumnSliceMax] = {};
  for (std::uint64_t begin = 0; begin < row_count; begin += kBlockRows) {
    const std::uint64_t end = std::min(row_count, begin + kBlockRows);
    float weight_block[kColumnSliceMax] = {};
    float bias_block[kColumnSliceMax] = {};
    for (std::uint64_t row = begin; row < end; ++row) {
      const RowMoments m = moments[row];
      for (std::uint64_t j = 0; j < column_count; ++j) {
        const float g = dy[row * stride + j];
        weight_block[j] += g * ((x[row * stride + j] - m.mean) * m.inverse_deviation);
        bias_block[j] += g;
      }
    }
    for (std::uint64_t j = 0; j < column_count; ++j) {
      weight_total[j] += weight_block[j];
      bias_total[j] += bias_block[j];
    }
  }
  for (std::uint64_t j = 0; j < column_count; ++j) {
    weight[j] = weight_total[j];
    bias[j] = bias_total[j];
  }
}

SLUICE_ROW_KERNEL void widen_bf16_row(const std::uint16_t* source, float* target,
                                      std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) target[i] = float_from_bf16(source[i]);
}

SLUICE_ROW_KERNEL void round_bf16_row(const float* source, std::uint16_t* target,
                                      std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    // bf16_from_float() with the NaN case as a selection, so that it vectorizes.
    const std::uint32_t bits = bits_from_float(source[i]);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t nan = (bits >> 16) | 0x0040u;
    target[i] =
        static_cast<std::uint16_t>(selected((bits & 0x7fffffffu) > 0x7f800000u, nan, rounded));
  }
}

SLUICE_ROW_KERNEL void widen_fp16_row(const std::uint16_t* source, float* target,
                                      std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    // Exponent and mantissa at their place in fp32 are the value times 2^-112, denormals included;
    // the multiplication is exact. An exponent of ones stays one.
    const std::uint32_t sign = static_cast<std::uint32_t>(source[i] & 0x8000u) << 16;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(source[i] & 0x7fffu) << 13;
    const float finite = float_from_bits(magnitude) * 0x1p112f;
    const float special = float_from_bits(magnitude | 0x7f800000u);
    target[i] = float_from_bits(
        sign | bits_from_float(selected(magnitude >= 0x0f800000u, special, finite)));
  }
}

SLUICE_ROW_KERNEL void round_fp16_row(const float* source, std::uint16_t* target,
                                      std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    // fp16_from_float() with its cases as selections.
    const std::uint32_t bits = bits_from_float(source[i]);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t normal =
        (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    const std::uint32_t denormal = bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
    const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    const std::uint32_t finite = selected(magnitude < 0x38800000u, denormal, normal);
    const std::uint32_t large = selected(magnitude > 0x7f800000u, nan, 0x7c00u);
    target[i] = static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) |
                                           selected(magnitude < 0x47800000u, finite, large));
  }
}

}  // namespace sluice::gpt
