// Causal multi-head attention of DeviceGpt, forward and backward.
#include <algorithm>
#include <cmath>

#include "tools/gpt/model/device_gpt.h"

namespace sluice::gpt {
namespace {

// Some heads of some sequences, in the arrays of all.
struct HeadRange {
  std::uint64_t first_row;  // of the first sequence
  std::uint64_t first_head;
  HeadGroup size;
};

template <class Body>
void for_each_group(BatchShape shape, std::uint64_t heads, HeadGroup group, const Body& body) {
  for (std::uint64_t sequence = 0; sequence < shape.batch; sequence += group.sequences) {
    for (std::uint64_t head = 0; head < heads; head += group.heads)
      body(HeadRange{sequence * shape.sequence,
                     head,
                     {.sequences = std::min(group.sequences, shape.batch - sequence),
                      .heads = std::min(group.heads, heads - head)}});
  }
}

// The [sequence, head_width] of the first head of a group, inside rows of all heads.
struct Heads {
  std::byte* data;
  std::uint64_t stride;  // elements from row to row
};

// The products of a group. A product that is computed several times in one launch has one stride in
// each array, and the heads of a group have two: from head to head, and from sequence to sequence.
// So a launch computes all heads of one sequence, or one head of all sequences, whichever takes
// fewer launches. The scores are [sequences, heads, length, length].
class GroupProducts {
 public:
  GroupProducts(DeviceOps& ops, StreamId stream, std::uint64_t length, std::uint64_t head_width,
                HeadGroup group)
      : ops_(ops),
        stream_(stream),
        length_(length),
        head_width_(head_width),
        group_(group),
        takes_sequences_(group.sequences > group.heads) {}

  // [length, length], fp32, from a and b transposed.
  void outer(Heads a, Heads b, float* result) const {
    const Steps of_a = steps(a);
    const Steps of_b = steps(b);
    const Steps of_result = steps_of_scores();
    for (std::uint64_t launch = 0; launch < launches(); ++launch)
      ops_.multiply({.form = Form::kABt,
                     .m = length_,
                     .n = length_,
                     .k = head_width_,
                     .a = a.data + launch * of_a.launch * type_bytes(),
                     .a_stride = a.stride,
                     .b = b.data + launch * of_b.launch * type_bytes(),
                     .b_stride = b.stride,
                     .result = result + launch * of_result.launch,
                     .result_stride = length_,
                     .result_type = DType::kFp32,
                     .batch = batch(),
                     .a_batch_stride = of_a.product,
                     .b_batch_stride = of_b.product,
                     .result_batch_stride = of_result.product},
                    stream_);
  }
  // From a [length, length], transposed or not, and b.
  void inner(Form form, const std::byte* a, Heads b, Heads result) const {
    const Steps of_a = steps_of_scores();
    const Steps of_b = steps(b);
    const Steps of_result = steps(result);
    for (std::uint64_t launch = 0; launch < launches(); ++launch)
      ops_.multiply({.form = form,
                     .m = length_,
                     .n = head_width_,
                     .k = length_,
                     .a = a + launch * of_a.launch * type_bytes(),
                     .a_stride = length_,
                     .b = b.data + launch * of_b.launch * type_bytes(),
                     .b_stride = b.stride,
                     .result = result.data + launch * of_result.launch * type_bytes(),
                     .result_stride = result.stride,
                     .result_type = ops_.type(),
                     .batch = batch(),
                     .a_batch_stride = of_a.product,
                     .b_batch_stride = of_b.product,
                     .result_batch_stride = of_result.product},
                    stream_);
  }

 private:
  // Elements from launch to launch, and from product to product of a launch.
  struct Steps {
    std::uint64_t launch;
    std::uint64_t product;
  };
  Steps ordered(std::uint64_t from_sequence_to_sequence, std::uint64_t from_head_to_head) const {
    if (takes_sequences_) return {from_head_to_head, from_sequence_to_sequence};
    return {from_sequence_to_sequence, from_head_to_head};
  }
  Steps steps(Heads heads) const { return ordered(length_ * heads.stride, head_width_); }
  Steps steps_of_scores() const {
    return ordered(group_.heads * length_ * length_, length_ * length_);
  }
  std::uint64_t launches() const { return takes_sequences_ ? group_.heads : group_.sequences; }
  std::uint64_t batch() const { return takes_sequences_ ? group_.sequences : group_.heads; }
  std::uint64_t type_bytes() const { return size_of(ops_.type()); }

  DeviceOps& ops_;
  const StreamId stream_;
  const std::uint64_t length_;
  const std::uint64_t head_width_;
  const HeadGroup group_;
  const bool takes_sequences_;
};

}  // namespace

// Per head: scores = Q K^T, probabilities = softmax, y = probabilities V. Part 0, 1 or 2 of a row
// of qkv is its query, key or value.
void DeviceGpt::attention_forward(const DeviceBlock& block) {
  const std::uint64_t width = config_.embedding;
  for_each_group(shape_, config_.heads, head_group_, [&](const HeadRange& g) {
    const GroupProducts products(ops_, stream_, shape_.sequence, config_.head_width(), g.size);
    const std::uint64_t column = g.first_head * config_.head_width();
    const auto qkv = [&](std::uint64_t part) {
      return Heads{block.qkv + (g.first_row * 3 * width + part * width + column) * type_bytes(),
                   3 * width};
    };
    products.outer(qkv(0), qkv(1), arrays_.scores);
    ops_.softmax_forward(softmax_of(block, g.first_row, g.first_head, g.size), stream_);
    const Heads y{block.attention + (g.first_row * width + column) * type_bytes(), width};
    products.inner(Form::kAB, arrays_.probabilities, qkv(2), y);
  });
}

// From the gradient of the attention's output, in d_narrow, to that of qkv, in d_wide.
void DeviceGpt::attention_backward(const DeviceBlock& block) {
  const std::uint64_t width = config_.embedding;
  for_each_group(shape_, config_.heads, head_group_, [&](const HeadRange& g) {
    const GroupProducts products(ops_, stream_, shape_.sequence, config_.head_width(), g.size);
    const std::uint64_t column = g.first_head * config_.head_width();
    const auto part_of = [&](std::byte* array, std::uint64_t part) {
      return Heads{array + (g.first_row * 3 * width + part * width + column) * type_bytes(),
                   3 * width};
    };
    const std::uint64_t y_offset = (g.first_row * width + column) * type_bytes();
    const Heads dy{arrays_.d_narrow + y_offset, width};
    products.outer(part_of(block.qkv, 0), part_of(block.qkv, 1), arrays_.scores);
    products.outer(dy, part_of(block.qkv, 2), arrays_.d_probabilities);
    ops_.softmax_backward({.forward = softmax_of(block, g.first_row, g.first_head, g.size),
                           .d_probabilities = arrays_.d_probabilities,
                           .d_scores = arrays_.d_scores,
                           .y = block.attention + y_offset,
                           .dy = dy.data,
                           .y_stride = width,
                           .head_width = config_.head_width()},
                          stream_);
    products.inner(Form::kAB, arrays_.d_scores, part_of(block.qkv, 1), part_of(arrays_.d_wide, 0));
    products.inner(Form::kAtB, arrays_.d_scores, part_of(block.qkv, 0), part_of(arrays_.d_wide, 1));
    products.inner(Form::kAtB, arrays_.probabilities, dy, part_of(arrays_.d_wide, 2));
  });
}

// A group of several sequences has all of their heads, so its log_sums lie together.
SoftmaxArguments DeviceGpt::softmax_of(const DeviceBlock& block, std::uint64_t first_row,
                                       std::uint64_t first_head, HeadGroup group) const {
  return {.scores = arrays_.scores,
          .probabilities = arrays_.probabilities,
          .log_sums = block.log_sums + first_row * config_.heads + first_head * shape_.sequence,
          .scale = 1.0f / std::sqrt(static_cast<float>(config_.head_width())),
          .sequences = group.sequences,
          .heads = group.heads,
          .sequence = shape_.sequence};
}

}  // namespace sluice::gpt
