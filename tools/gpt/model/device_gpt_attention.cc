// Causal multi-head attention of DeviceGpt, forward and backward.
#include <algorithm>
#include <cmath>

#include "tools/gpt/model/device_gpt.h"

namespace sluice::gpt {
namespace {

// Some heads of one sequence, in the arrays of all.
struct HeadGroup {
  std::uint64_t first_row;  // of the sequence
  std::uint64_t first_head;
  std::uint64_t heads;
};

template <class Body>
void for_each_group(BatchShape shape, std::uint64_t heads, std::uint64_t group, const Body& body) {
  for (std::uint64_t sequence = 0; sequence < shape.batch; ++sequence) {
    for (std::uint64_t head = 0; head < heads; head += group)
      body(HeadGroup{sequence * shape.sequence, head, std::min(group, heads - head)});
  }
}

// One head's [sequence, head_width] after the other, inside rows of all heads.
struct Heads {
  std::byte* data;
  std::uint64_t stride;  // elements from row to row
};

// The products of a group of heads.
struct GroupProducts {
  std::uint64_t length;
  std::uint64_t head_width;
  std::uint64_t heads;
  DType type;

  // [length, length], fp32, from a and b transposed.
  Product outer(Heads a, Heads b, float* result) const {
    return {.form = Form::kABt,
            .m = length,
            .n = length,
            .k = head_width,
            .a = a.data,
            .a_stride = a.stride,
            .b = b.data,
            .b_stride = b.stride,
            .result = result,
            .result_stride = length,
            .result_type = DType::kFp32,
            .batch = heads,
            .a_batch_stride = head_width,
            .b_batch_stride = head_width,
            .result_batch_stride = length * length};
  }
  // From a [length, length], transposed or not, and b.
  Product inner(Form form, const std::byte* a, Heads b, Heads result) const {
    return {.form = form,
            .m = length,
            .n = head_width,
            .k = length,
            .a = a,
            .a_stride = length,
            .b = b.data,
            .b_stride = b.stride,
            .result = result.data,
            .result_stride = result.stride,
            .result_type = type,
            .batch = heads,
            .a_batch_stride = length * length,
            .b_batch_stride = head_width,
            .result_batch_stride = head_width};
  }
};

}  // namespace

// Per head: scores = Q K^T, probabilities = softmax, y = probabilities V. Part 0, 1 or 2 of a row
// of qkv is its query, key or value.
void DeviceGpt::attention_forward(const DeviceBlock& block) {
  const std::uint64_t width = config_.embedding;
  for_each_group(shape_, config_.heads, head_group_, [&](const HeadGroup& g) {
    const GroupProducts products{shape_.sequence, config_.head_width(), g.heads, ops_.type()};
    const std::uint64_t column = g.first_head * config_.head_width();
    const auto qkv = [&](std::uint64_t part) {
      return Heads{block.qkv + (g.first_row * 3 * width + part * width + column) * type_bytes(),
                   3 * width};
    };
    ops_.multiply(products.outer(qkv(0), qkv(1), arrays_.scores), stream_);
    ops_.softmax_forward(softmax_of(block, g.first_row, g.first_head, g.heads), stream_);
    const Heads y{block.attention + (g.first_row * width + column) * type_bytes(), width};
    ops_.multiply(products.inner(Form::kAB, arrays_.probabilities, qkv(2), y), stream_);
  });
}

// From the gradient of the attention's output, in d_narrow, to that of qkv, in d_wide.
void DeviceGpt::attention_backward(const DeviceBlock& block) {
  const std::uint64_t width = config_.embedding;
  for_each_group(shape_, config_.heads, head_group_, [&](const HeadGroup& g) {
    const GroupProducts products{shape_.sequence, config_.head_width(), g.heads, ops_.type()};
    const std::uint64_t column = g.first_head * config_.head_width();
    const auto part_of = [&](std::byte* array, std::uint64_t part) {
      return Heads{array + (g.first_row * 3 * width + part * width + column) * type_bytes(),
                   3 * width};
    };
    const std::uint64_t y_offset = (g.first_row * width + column) * type_bytes();
    const Heads dy{arrays_.d_narrow + y_offset, width};
    ops_.multiply(products.outer(part_of(block.qkv, 0), part_of(block.qkv, 1), arrays_.scores),
                  stream_);
    ops_.multiply(products.outer(dy, part_of(block.qkv, 2), arrays_.d_probabilities), stream_);
    ops_.softmax_backward({.forward = softmax_of(block, g.first_row, g.first_head, g.heads),
                           .d_probabilities = arrays_.d_probabilities,
                           .d_scores = arrays_.d_scores,
                           .y = block.attention + y_offset,
                           .dy = dy.data,
                           .y_stride = width,
                           .head_width = config_.head_width()},
                          stream_);
    ops_.multiply(products.inner(Form::kAB, arrays_.d_scores, part_of(block.qkv, 1),
                                 part_of(arrays_.d_wide, 0)),
                  stream_);
    ops_.multiply(products.inner(Form::kAtB, arrays_.d_scores, part_of(block.qkv, 0),
                                 part_of(arrays_.d_wide, 1)),
                  stream_);
    ops_.multiply(products.inner(Form::kAtB, arrays_.probabilities, dy, part_of(arrays_.d_wide, 2)),
                  stream_);
  });
}

SoftmaxArguments DeviceGpt::softmax_of(const DeviceBlock& block, std::uint64_t first_row,
                                       std::uint64_t first_head, std::uint64_t heads) const {
  return {.scores = arrays_.scores,
          .probabilities = arrays_.probabilities,
          .log_sums = block.log_sums + first_row * config_.heads + first_head * shape_.sequence,
          .scale = 1.0f / std::sqrt(static_cast<float>(config_.head_width())),
          .heads = heads,
          .sequence = shape_.sequence};
}

}  // namespace sluice::gpt
