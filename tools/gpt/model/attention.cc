#include "tools/gpt/model/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <sluice/error.h>
#include <sluice/units.h>
#include "tools/gpt/model/row_kernels.h"

namespace sluice::gpt {
namespace {

// Query rows per block: 64 rows of scores against 1,024 keys fit a second-level cache.
constexpr std::uint64_t kQueryBlock = 64;

// The strided matrices of one sequence and head inside the batch.
struct HeadView {
  std::uint64_t width;
  std::uint64_t offset_qkv;  // of the query in qkv
  std::uint64_t offset_y;

  HeadView(const AttentionShape& shape, std::uint64_t task)
      : width(shape.heads * shape.head_width) {
    const std::uint64_t row = task / shape.heads * shape.sequence;
    const std::uint64_t column = task % shape.heads * shape.head_width;
    offset_qkv = row * 3 * width + column;
    offset_y = row * width + column;
  }

  // part: 0 query, 1 key, 2 value; rows [begin, begin + rows) of the sequence.
  std::uint64_t at(std::uint64_t part, std::uint64_t begin) const {
    return offset_qkv + part * width + begin * 3 * width;
  }
};

std::uint64_t block_floats(std::uint64_t sequence) {
  return std::min(sequence, kQueryBlock) * align_up(sequence, 64);
}

}  // namespace

std::uint64_t attention_scratch_floats(std::uint64_t sequence) {
  return 2 * align_up(block_floats(sequence), 64);
}

void attention_forward(MatrixProducts& products, AttentionShape shape, const float* qkv, float* y,
                       float* log_sums, std::span<float> scratch) {
  const std::uint64_t scratch_floats = attention_scratch_floats(shape.sequence);
  SLUICE_CHECK(scratch.size() >= products.threads().threads() * scratch_floats,
               "attention scratch too small");
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape.head_width));
  products.threads().for_each(shape.batch * shape.heads, [&](std::uint64_t task, unsigned worker) {
    const HeadView head(shape, task);
    float* scores = scratch.data() + worker * scratch_floats;
    for (std::uint64_t begin = 0; begin < shape.sequence; begin += kQueryBlock) {
      const std::uint64_t rows = std::min(kQueryBlock, shape.sequence - begin);
      const std::uint64_t keys = begin + rows;
      const std::uint64_t stride = 3 * head.width;
      const ConstMatrix query{qkv + head.at(0, begin), rows, shape.head_width, stride};
      const ConstMatrix key{qkv + head.at(1, 0), keys, shape.head_width, stride};
      const ConstMatrix value{qkv + head.at(2, 0), keys, shape.head_width, stride};
      products.multiply_serial(Form::kABt, query, key, {scores, rows, keys, keys});
      for (std::uint64_t row = 0; row < rows; ++row) {
        const std::uint64_t visible = begin + row + 1;
        float* values = scores + row * keys;
        log_sums[task * shape.sequence + begin + row] = softmax_row(values, scale, visible);
        std::memset(values + visible, 0, (keys - visible) * sizeof(float));
      }
      float* target = y + head.offset_y + begin * head.width;
      products.multiply_serial(Form::kAB, {scores, rows, keys, keys}, value,
                               {target, rows, shape.head_width, head.width});
    }
  });
}

void attention_backward(MatrixProducts& products, AttentionShape shape, AttentionSaved saved,
                        const float* dy, float* dqkv, std::span<float> scratch) {
  const std::uint64_t scratch_floats = attention_scratch_floats(shape.sequence);
  SLUICE_CHECK(scratch.size() >= products.threads().threads() * scratch_floats,
               "attention scratch too small");
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape.head_width));
  products.threads().for_each(shape.batch * shape.heads, [&](std::uint64_t task, unsigned worker) {
    const HeadView head(shape, task);
    const std::uint64_t stride = 3 * head.width;
    float* scores = scratch.data() + worker * scratch_floats;
    float* gradient = scores + scratch_floats / 2;
    const std::uint64_t last = (div_ceil(shape.sequence, kQueryBlock) - 1) * kQueryBlock;
    // Backwards over the blocks: the first one met sees all keys and overwrites their gradients.
    for (std::uint64_t begin = last;; begin -= kQueryBlock) {
      const std::uint64_t rows = std::min(kQueryBlock, shape.sequence - begin);
      const std::uint64_t keys = begin + rows;
      const ConstMatrix query{saved.qkv + head.at(0, begin), rows, shape.head_width, stride};
      const ConstMatrix key{saved.qkv + head.at(1, 0), keys, shape.head_width, stride};
      const ConstMatrix value{saved.qkv + head.at(2, 0), keys, shape.head_width, stride};
      const std::uint64_t offset = head.offset_y + begin * head.width;
      const ConstMatrix d_output{dy + offset, rows, shape.head_width, head.width};
      products.multiply_serial(Form::kABt, query, key, {scores, rows, keys, keys});
      products.multiply_serial(Form::kABt, d_output, value, {gradient, rows, keys, keys});
      for (std::uint64_t row = 0; row < rows; ++row) {
        const std::uint64_t visible = begin + row + 1;
        const float delta = dot_row(saved.y + offset + row * head.width,
                                    dy + offset + row * head.width, shape.head_width);
        const float log_sum = saved.log_sums[task * shape.sequence + begin + row];
        float* row_scores = scores + row * keys;
        float* row_gradient = gradient + row * keys;
        softmax_backward_row(row_scores, row_gradient, scale, log_sum, delta, visible);
        std::memset(row_scores + visible, 0, (keys - visible) * sizeof(float));
        std::memset(row_gradient + visible, 0, (keys - visible) * sizeof(float));
      }
      float* d_key = dqkv + head.at(1, 0);
      float* d_value = dqkv + head.at(2, 0);
      const bool first = begin == last;
      products.multiply_serial(Form::kAB, {gradient, rows, keys, keys}, key,
                               {dqkv + head.at(0, begin), rows, shape.head_width, stride});
      products.multiply_serial(Form::kAtB, {gradient, rows, keys, keys}, query,
                               {d_key, keys, shape.head_width, stride},
                               {.matrix = first ? nullptr : d_key});
      products.multiply_serial(Form::kAtB, {scores, rows, keys, keys}, d_output,
                               {d_value, keys, shape.head_width, stride},
                               {.matrix = first ? nullptr : d_value});
      if (begin == 0) break;
    }
  });
}

}  // namespace sluice::gpt
