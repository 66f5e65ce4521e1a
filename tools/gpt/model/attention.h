// The forward and backward passes of causal multi-head attention (Vaswani et al. 2017). There is
// one task per sequence and head. Inside a task, a block of query rows is multiplied only by the
// keys up to the block's last row. The backward pass recomputes the probabilities from one saved
// number per row (Dao et al. 2022). The memory therefore grows linearly with the length of the
// sequence, and not quadratically. The functions are pure.
#pragma once

#include <cstdint>
#include <span>

#include "tools/gpt/model/matmul.h"

namespace sluice::gpt {

struct AttentionShape {
  std::uint64_t batch = 0;
  std::uint64_t sequence = 0;
  std::uint64_t heads = 0;
  std::uint64_t head_width = 0;
};

// Returns the number of floats of scratch memory that each worker needs for sequences of up to
// `sequence` tokens.
std::uint64_t attention_scratch_floats(std::uint64_t sequence);

// qkv has the shape [batch * sequence, 3 * width]. A row of qkv has the queries of all heads first,
// then the keys of all heads, and then the values of all heads. The function writes y [batch *
// sequence, width] and log_sums [batch * heads * sequence]. log_sums has the logarithm of each
// softmax's denominator. `scratch` must have attention_scratch_floats() floats per worker.
void attention_forward(MatrixProducts& products, AttentionShape shape, const float* qkv, float* y,
                       float* log_sums, std::span<float> scratch);

struct AttentionSaved {
  const float* qkv = nullptr;
  const float* y = nullptr;
  const float* log_sums = nullptr;
};

// Computes `dqkv` from `dy`. `dy` is the gradient with respect to y, and `dqkv` is the gradient
// with respect to qkv.
void attention_backward(MatrixProducts& products, AttentionShape shape, AttentionSaved saved,
                        const float* dy, float* dqkv, std::span<float> scratch);

}  // namespace sluice::gpt
