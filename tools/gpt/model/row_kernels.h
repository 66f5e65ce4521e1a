// The element-wise arithmetic of the model on contiguous fp32 memory. Each function runs on one
// thread. Sums are computed in 16 fixed lanes. A multiply is never fused with an add. The compiler
// makes several versions of each function, one for each instruction set. All versions therefore
// give the same bits. The functions are pure, and any thread may call them on disjoint memory. The
// functions do not check values, so NaN and infinity pass through.
#pragma once

#include <cstdint>

namespace sluice::gpt {

// The backward pass of a layer norm needs these two numbers for each row.
struct RowMoments {
  float mean;
  float inverse_deviation;  // 1 / sqrt(variance + 1e-5)
};

// y = GELU(x) = x / (1 + exp(-2u)), u = sqrt(2 / pi) * (x + 0.044715 x^3). The formula is the tanh
// approximation of GPT-2 (Hendrycks & Gimpel 2016), rewritten with 0.5 * (1 + tanh(u)) =
// sigmoid(2u). A polynomial approximates the exponential function. The relative error of y stays
// below 3e-6.
void gelu_row(const float* x, float* y, std::uint64_t count);

// gradient[i] *= GELU'(x[i]).
void gelu_backward_row(const float* x, float* gradient, std::uint64_t count);

// y = (x - mean) * inverse_deviation * weight + bias, over one row of `count` elements.
RowMoments layer_norm_row(const float* x, const float* weight, const float* bias, float* y,
                          std::uint64_t count);

enum class Into : std::uint8_t { kOverwrite, kAccumulate };
// Computes the gradient of layer_norm_row with respect to x, from dy (Ba, Kiros, Hinton 2016).
// The argument `into` says whether the gradient overwrites dx or is added to dx.
void layer_norm_backward_row(const float* x, RowMoments moments, const float* weight,
                             const float* dy, float* dx, std::uint64_t count, Into into);

// Overwrites the scores s of one attention row with softmax(scale * s).
// Returns log(sum(exp(scale * s))).
float softmax_row(float* scores, float scale, std::uint64_t count);

// Overwrites the scores s with the probabilities p = exp(scale * s - log_sum). On entry, `gradient`
// is the gradient with respect to p. The function overwrites `gradient` with the gradient with
// respect to s: p * (gradient - delta) * scale.
void softmax_backward_row(float* scores, float* gradient, float scale, float log_sum, float delta,
                          std::uint64_t count);

// Returns the cross entropy -log(softmax(logits)[target]).
float cross_entropy_row(const float* logits, std::uint64_t count, std::uint64_t target);

// Returns the same value as cross_entropy_row(). Overwrites each logit with `scale` times the
// gradient with respect to this logit.
float cross_entropy_gradient_row(float* logits, std::uint64_t count, std::uint64_t target,
                                 float scale);

// sum(a[i] * b[i]).
float dot_row(const float* a, const float* b, std::uint64_t count);

// target[i] += source[i].
void add_row(float* target, const float* source, std::uint64_t count);

inline constexpr std::uint64_t kColumnSliceMax = 32;
// Sums each of the first `column_count` columns over `row_count` rows. The rows are `stride`
// elements apart. The function first adds the rows of each block of 64 rows, in order. The function
// then adds the sums of the blocks, in order.
// Requires: column_count <= kColumnSliceMax.
void column_sums(const float* rows, std::uint64_t row_count, std::uint64_t stride,
                 std::uint64_t column_count, float* sums);

// Computes the gradients of a layer norm's weight and bias for a slice of columns: weight[j] =
// sum(dy * (x - mean) * inverse_deviation), bias[j] = sum(dy). The values are added in the same
// order as in column_sums(). `stride` is the stride of both x and dy.
void layer_norm_parameter_sums(const float* x, const RowMoments* moments, const float* dy,
                               std::uint64_t row_count, std::uint64_t stride,
                               std::uint64_t column_count, float* weight, float* bias);

// The widen functions convert bf16 and fp16 to fp32 exactly. The round functions convert fp32 to
// bf16 and fp16, with rounding to nearest even. sluice/dtype.h defines all four conversions.
void widen_bf16_row(const std::uint16_t* source, float* target, std::uint64_t count);
void round_bf16_row(const float* source, std::uint16_t* target, std::uint64_t count);
void widen_fp16_row(const std::uint16_t* source, float* target, std::uint64_t count);
void round_fp16_row(const float* source, std::uint16_t* target, std::uint64_t count);

}  // namespace sluice::gpt
