#include "tools/gpt/model/layers.h"

#include <algorithm>
#include <cstring>

#include <sluice/units.h>

namespace sluice::gpt {
namespace {

// Large enough that a task costs more than handing it out, small enough for several per thread at
// the smallest model that is worth training.
constexpr std::uint64_t kChunkElements = 16 * 1024;

// body(begin, end) over pieces of [0, count).
template <class Body>
void for_each_piece(ComputeThreads& threads, std::uint64_t count, std::uint64_t piece,
                    const Body& body) {
  threads.for_each(div_ceil(count, piece), [&](std::uint64_t task, unsigned) {
    body(task * piece, std::min(count, (task + 1) * piece));
  });
}

// body(row) for every row, in pieces of about kChunkElements elements.
template <class Body>
void for_each_row(ComputeThreads& threads, Extent extent, const Body& body) {
  const std::uint64_t piece = div_ceil(kChunkElements, extent.columns);
  for_each_piece(threads, extent.rows, piece, [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t row = begin; row < end; ++row) body(row);
  });
}

void load_row(DType dtype, const void* table, std::uint64_t row, std::uint64_t width,
              float* target) {
  const auto* const halves = static_cast<const std::uint16_t*>(table) + row * width;
  switch (dtype) {
    case DType::kFp32:
      std::memcpy(target, static_cast<const float*>(table) + row * width, width * sizeof(float));
      return;
    case DType::kBf16: return widen_bf16_row(halves, target, width);
    case DType::kFp16: break;
  }
  widen_fp16_row(halves, target, width);
}

// Piece by piece through a small buffer: each write goes to a place that is not read any more.
void round_bf16_in_place(float* values, std::uint64_t count) {
  constexpr std::uint64_t kPiece = 256;
  float piece[kPiece];
  auto* const rounded = reinterpret_cast<std::uint16_t*>(values);
  for (std::uint64_t i = 0; i < count; i += kPiece) {
    const std::uint64_t length = std::min(kPiece, count - i);
    std::memcpy(piece, values + i, length * sizeof(float));
    round_bf16_row(piece, rounded + i, length);
  }
}

}  // namespace

void embedding_forward(ComputeThreads& threads, EmbeddingTables tables,
                       std::span<const std::uint32_t> tokens, std::uint64_t sequence,
                       std::uint64_t width, float* y) {
  for_each_row(threads, {.rows = tokens.size(), .columns = width}, [&](std::uint64_t t) {
    float* target = y + t * width;
    load_row(tables.dtype, tables.token, tokens[t], width, target);
    // A row of positions passes through a small buffer, piece by piece.
    constexpr std::uint64_t kPiece = 256;
    float piece[kPiece];
    const std::uint64_t row_begin = t % sequence * width;
    for (std::uint64_t i = 0; i < width; i += kPiece) {
      const std::uint64_t count = std::min(kPiece, width - i);
      const void* source =
          static_cast<const std::byte*>(tables.position) + (row_begin + i) * size_of(tables.dtype);
      load_row(tables.dtype, source, 0, count, piece);
      add_row(target + i, piece, count);
    }
  });
}

void embedding_backward(ComputeThreads& threads, std::span<const std::uint32_t> tokens,
                        std::uint64_t sequence, std::uint64_t width, const float* dy,
                        EmbeddingGradients gradients) {
  fill_zero(threads, gradients.token, gradients.vocabulary * width);
  // A task owns a slice of columns of every row, so that no two add to one element.
  for_each_piece(threads, width, kColumnSliceMax, [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t t = 0; t < tokens.size(); ++t)
      add_row(gradients.token + tokens[t] * width + begin, dy + t * width + begin, end - begin);
  });
  for_each_row(threads, {gradients.context, width}, [&](std::uint64_t position) {
    float* target = gradients.position + position * width;
    std::memset(target, 0, width * sizeof(float));
    if (position >= sequence) return;
    for (std::uint64_t t = position; t < tokens.size(); t += sequence)
      add_row(target, dy + t * width, width);
  });
}

void layer_norm_forward(ComputeThreads& threads, Extent extent, const float* x,
                        LayerNormParameters parameters, float* y, RowMoments* moments) {
  const std::uint64_t width = extent.columns;
  for_each_row(threads, extent, [&](std::uint64_t row) {
    moments[row] =
        layer_norm_row(x + row * width, parameters.weight, parameters.bias, y + row * width, width);
  });
}

void layer_norm_backward(ComputeThreads& threads, Extent extent, LayerNormSaved saved,
                         const float* dy, LayerNormGradients gradients) {
  const std::uint64_t width = extent.columns;
  for_each_row(threads, extent, [&](std::uint64_t row) {
    const std::uint64_t offset = row * width;
    layer_norm_backward_row(saved.x + offset, saved.moments[row], saved.weight, dy + offset,
                            gradients.x + offset, width, gradients.into);
  });
  for_each_piece(threads, width, kColumnSliceMax, [&](std::uint64_t begin, std::uint64_t end) {
    layer_norm_parameter_sums(saved.x + begin, saved.moments, dy + begin, extent.rows, width,
                              end - begin, gradients.weight + begin, gradients.bias + begin);
  });
}

void gelu_forward(ComputeThreads& threads, const float* x, float* y, std::uint64_t count) {
  for_each_piece(threads, count, kChunkElements, [&](std::uint64_t begin, std::uint64_t end) {
    gelu_row(x + begin, y + begin, end - begin);
  });
}

void gelu_backward(ComputeThreads& threads, const float* x, float* gradient, std::uint64_t count) {
  for_each_piece(threads, count, kChunkElements, [&](std::uint64_t begin, std::uint64_t end) {
    gelu_backward_row(x + begin, gradient + begin, end - begin);
  });
}

void bias_backward(ComputeThreads& threads, Extent extent, const float* dy, float* sums) {
  for_each_piece(threads, extent.columns, kColumnSliceMax,
                 [&](std::uint64_t begin, std::uint64_t end) {
                   column_sums(dy + begin, extent.rows, extent.columns, end - begin, sums + begin);
                 });
}

double cross_entropy(ComputeThreads& threads, Extent extent, float* logits,
                     std::span<const std::uint32_t> targets, float* row_losses, CrossEntropy kind,
                     float gradient_scale, DType gradient_type) {
  const float scale = gradient_scale / static_cast<float>(extent.rows);
  for_each_row(threads, extent, [&](std::uint64_t row) {
    float* values = logits + row * extent.columns;
    row_losses[row] = kind == CrossEntropy::kGradient
                          ? cross_entropy_gradient_row(values, extent.columns, targets[row], scale)
                          : cross_entropy_row(values, extent.columns, targets[row]);
    if (kind == CrossEntropy::kGradient && gradient_type == DType::kBf16)
      round_bf16_in_place(values, extent.columns);
  });
  double total = 0;
  for (std::uint64_t row = 0; row < extent.rows; ++row) total += row_losses[row];
  return total / static_cast<double>(extent.rows);
}

void fill_zero(ComputeThreads& threads, float* values, std::uint64_t count) {
  for_each_piece(threads, count, kChunkElements, [&](std::uint64_t begin, std::uint64_t end) {
    std::memset(values + begin, 0, (end - begin) * sizeof(float));
  });
}

void widen(ComputeThreads& threads, DType dtype, const void* source, float* target,
           std::uint64_t count) {
  const auto* values = static_cast<const std::uint16_t*>(source);
  const auto widen_row = dtype == DType::kBf16 ? widen_bf16_row : widen_fp16_row;
  for_each_piece(threads, count, kChunkElements, [&](std::uint64_t begin, std::uint64_t end) {
    widen_row(values + begin, target + begin, end - begin);
  });
}

void round_to(ComputeThreads& threads, DType dtype, const float* source, void* target,
              std::uint64_t count) {
  auto* values = static_cast<std::uint16_t*>(target);
  const auto round_row = dtype == DType::kBf16 ? round_bf16_row : round_fp16_row;
  for_each_piece(threads, count, kChunkElements, [&](std::uint64_t begin, std::uint64_t end) {
    round_row(source + begin, values + begin, end - begin);
  });
}

}  // namespace sluice::gpt
