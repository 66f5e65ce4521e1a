// The forward and backward passes of GPT-2's layers, except attention and matrix products. The work
// is spread over threads in fixed pieces. The order of sums over tokens therefore does not depend
// on the number of threads. Matrices are row-major with one row per token. Results depend on the
// arguments only. Any thread may call the functions on disjoint memory. Two calls must not use the
// same ComputeThreads at the same time.
#pragma once

#include <cstdint>
#include <span>

#include <sluice/dtype.h>
#include "tools/gpt/model/compute_threads.h"
#include "tools/gpt/model/row_kernels.h"

namespace sluice::gpt {

// The size of a matrix that has no gaps between its rows. Each of `rows` rows has `columns`
// elements.
struct Extent {
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
};

// The two tables of the embedding, as they are stored in the unit.
struct EmbeddingTables {
  DType dtype = DType::kFp32;
  const void* token = nullptr;     // [vocabulary, width]
  const void* position = nullptr;  // [context, width]
};

// y[t] = token[tokens[t]] + position[t % sequence].
// Requires: every token is below the vocabulary, and sequence <= context.
void embedding_forward(ComputeThreads& threads, EmbeddingTables tables,
                       std::span<const std::uint32_t> tokens, std::uint64_t sequence,
                       std::uint64_t width, float* y);

// The gradients of both tables. embedding_backward() writes all rows of both gradients. If a token
// is repeated, its gradients are added in the order of the batch.
struct EmbeddingGradients {
  float* token = nullptr;
  float* position = nullptr;
  std::uint64_t vocabulary = 0;
  std::uint64_t context = 0;
};
void embedding_backward(ComputeThreads& threads, std::span<const std::uint32_t> tokens,
                        std::uint64_t sequence, std::uint64_t width, const float* dy,
                        EmbeddingGradients gradients);

struct LayerNormParameters {
  const float* weight = nullptr;
  const float* bias = nullptr;
};
void layer_norm_forward(ComputeThreads& threads, Extent extent, const float* x,
                        LayerNormParameters parameters, float* y, RowMoments* moments);

// The values that the forward pass saves for the backward pass.
struct LayerNormSaved {
  const float* x = nullptr;
  const RowMoments* moments = nullptr;
  const float* weight = nullptr;
};
struct LayerNormGradients {
  float* x = nullptr;
  Into into = Into::kOverwrite;  // only for x; the parameters' gradients are always overwritten
  float* weight = nullptr;
  float* bias = nullptr;
};
void layer_norm_backward(ComputeThreads& threads, Extent extent, LayerNormSaved saved,
                         const float* dy, LayerNormGradients gradients);

void gelu_forward(ComputeThreads& threads, const float* x, float* y, std::uint64_t count);

// gradient *= GELU'(x), in place.
void gelu_backward(ComputeThreads& threads, const float* x, float* gradient, std::uint64_t count);

// sums[j] = the sum of column j, which is the gradient of a bias.
void bias_backward(ComputeThreads& threads, Extent extent, const float* dy, float* sums);

enum class CrossEntropy : std::uint8_t { kLossOnly, kGradient };
// Returns the mean cross entropy over the rows of `logits`. With kGradient, the call overwrites the
// logits with `gradient_scale` times the gradient of the mean. If `gradient_type` is bf16, each row
// of the gradient is rounded to bf16 and packed at the beginning of the row's memory. Otherwise,
// the gradient is fp32. `row_losses` is scratch memory for one number per row.
// Requires: every target is below extent.columns.
double cross_entropy(ComputeThreads& threads, Extent extent, float* logits,
                     std::span<const std::uint32_t> targets, float* row_losses, CrossEntropy kind,
                     float gradient_scale = 1, DType gradient_type = DType::kFp32);

void fill_zero(ComputeThreads& threads, float* values, std::uint64_t count);

// widen() converts a tensor from `dtype` to fp32, and round_to() converts from fp32 to `dtype`.
// `dtype` is bf16 or fp16.
void widen(ComputeThreads& threads, DType dtype, const void* source, float* target,
           std::uint64_t count);
void round_to(ComputeThreads& threads, DType dtype, const float* source, void* target,
              std::uint64_t count);

}  // namespace sluice::gpt
