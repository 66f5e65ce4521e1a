// The backward pass of DeviceGpt, forward read from the end, and both directions of attention.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "tools/gpt/device_gpt.h"
#include "tools/gpt/gpt_model.h"

namespace sluice::gpt {

void DeviceGpt::backward(std::uint32_t use, ParameterPointers parameters,
                         GradientPointers gradients, StreamId stream) {
  SLUICE_CHECK(mode_ == Mode::kTraining && forward_uses_done_ == use_count(),
               "backward follows a whole forward pass of training");
  SLUICE_CHECK(use == backward_uses_done_ && use < use_count(), "backward uses come in order");
  ++backward_uses_done_;
  parameters_ = parameters;
  gradients_ = gradients;
  stream_ = stream;
  const std::uint32_t forward_use = use_count() - 1 - use;
  switch (kind_of(forward_use)) {
    case Use::kTiedLogits:
      logits_backward(parameters[kWte], gradients[kWte]);
      device_.fill_zero(
          gradients[kWpe],
          std::uint64_t{config_.context} * config_.embedding * size_of(ops_.gradient_type()),
          stream_);
      break;
    case Use::kHead:
      if (!config_.tied_head) logits_backward(parameters[kLmHeadWeight], gradients[kLmHeadWeight]);
      norm_backward(arrays_.final_input, arrays_.final_moments, kFinalNormWeight, Into::kOverwrite);
      break;
    case Use::kBlock: block_backward(forward_use - 1); break;
    case Use::kEmbedding: embedding_backward_use(); break;
  }
}

// From the gradient of the logits to that of the final norm's output, in d_narrow.
void DeviceGpt::logits_backward(const std::byte* table, std::byte* table_gradient) {
  const std::uint64_t width = config_.embedding;
  const std::uint64_t vocabulary = config_.vocabulary;
  ops_.multiply({.form = Form::kAtB,
                 .m = vocabulary,
                 .n = width,
                 .k = rows(),
                 .a = arrays_.logits,
                 .a_stride = vocabulary,
                 .b = arrays_.final_norm,
                 .b_stride = width,
                 .result = table_gradient,
                 .result_stride = width,
                 .result_type = ops_.gradient_type()},
                stream_);
  ops_.multiply({.form = Form::kAB,
                 .m = rows(),
                 .n = width,
                 .k = vocabulary,
                 .a = arrays_.logits,
                 .a_stride = vocabulary,
                 .b = table,
                 .b_stride = width,
                 .result = arrays_.d_narrow,
                 .result_stride = width,
                 .result_type = ops_.type()},
                stream_);
}

// From the gradient in d_narrow to d_residual.
void DeviceGpt::norm_backward(const std::byte* x, const RowMoments* moments, std::uint32_t weight,
                              Into into) {
  ops_.layer_norm_backward({.x = x,
                            .moments = moments,
                            .weight = parameters_[weight],
                            .dy = arrays_.d_narrow,
                            .dx = arrays_.d_residual,
                            .into = into,
                            .weight_gradient = gradients_[weight],
                            .bias_gradient = gradients_[weight + 1],
                            .partials = arrays_.partials,
                            .rows = rows(),
                            .width = config_.embedding},
                           stream_);
}

void DeviceGpt::linear_backward(const std::byte* x, std::uint64_t x_width, const std::byte* dy,
                                std::uint64_t y_width, std::uint32_t weight, std::byte* dx) {
  ops_.multiply({.form = Form::kAtB,
                 .m = x_width,
                 .n = y_width,
                 .k = rows(),
                 .a = x,
                 .a_stride = x_width,
                 .b = dy,
                 .b_stride = y_width,
                 .result = gradients_[weight],
                 .result_stride = y_width,
                 .result_type = ops_.gradient_type()},
                stream_);
  ops_.bias_backward(dy, rows(), y_width, arrays_.partials, gradients_[weight + 1], stream_);
  ops_.multiply({.form = Form::kABt,
                 .m = rows(),
                 .n = x_width,
                 .k = y_width,
                 .a = dy,
                 .a_stride = y_width,
                 .b = parameters_[weight],
                 .b_stride = y_width,
                 .result = dx,
                 .result_stride = x_width,
                 .result_type = ops_.type()},
                stream_);
}

// d_residual comes in as the gradient of the block's output and leaves as that of its input.
void DeviceGpt::block_backward(std::uint32_t layer) {
  const Block& a = arrays_.blocks[layer];
  const std::uint64_t width = config_.embedding;
  linear_backward(a.gelu, 4 * width, arrays_.d_residual, width, kMlpProjectionWeight,
                  arrays_.d_wide);
  ops_.gelu_backward(a.mlp, arrays_.d_wide, rows() * 4 * width, stream_);
  linear_backward(a.norm2, width, arrays_.d_wide, 4 * width, kMlpWeight, arrays_.d_narrow);
  norm_backward(a.middle, a.norm2_moments, kLn2Weight, Into::kAccumulate);
  linear_backward(a.attention, width, arrays_.d_residual, width, kAttentionProjectionWeight,
                  arrays_.d_narrow);
  attention_backward(a);
  linear_backward(a.norm1, width, arrays_.d_wide, 3 * width, kAttentionWeight, arrays_.d_narrow);
  norm_backward(a.input, a.norm1_moments, kLn1Weight, Into::kAccumulate);
}

void DeviceGpt::embedding_backward_use() {
  ops_.embedding_backward({.order = arrays_.inputs + 2 * rows(),
                           .begin = arrays_.inputs + 3 * rows(),
                           .dy = arrays_.d_residual,
                           .token_gradient = gradients_[kWte],
                           .position_gradient = gradients_[kWpe],
                           .rows = rows(),
                           .sequence = shape_.sequence,
                           .width = config_.embedding,
                           .vocabulary = config_.vocabulary,
                           .context = config_.context},
                          stream_);
}

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

}  // namespace

// Per head: scores = Q K^T, probabilities = softmax, y = probabilities V. `part` 0, 1 or 2 of a row
// of qkv is its query, key or value.
void DeviceGpt::attention_forward(const Block& block) {
  const std::uint64_t length = shape_.sequence;
  const std::uint64_t width = config_.embedding;
  const std::uint64_t head_width = config_.head_width();
  for_each_group(shape_, config_.heads, head_group_, [&](const HeadGroup& g) {
    const auto qkv = [&](std::uint64_t part) {
      return block.qkv +
             (g.first_row * 3 * width + part * width + g.first_head * head_width) * type_bytes();
    };
    ops_.multiply({.form = Form::kABt,
                   .m = length,
                   .n = length,
                   .k = head_width,
                   .a = qkv(0),
                   .a_stride = 3 * width,
                   .b = qkv(1),
                   .b_stride = 3 * width,
                   .result = arrays_.scores,
                   .result_stride = length,
                   .result_type = DType::kFp32,
                   .batch = g.heads,
                   .a_batch_stride = head_width,
                   .b_batch_stride = head_width,
                   .result_batch_stride = length * length},
                  stream_);
    ops_.softmax_forward(
        {.scores = arrays_.scores,
         .probabilities = arrays_.probabilities,
         .log_sums = block.log_sums + g.first_row * config_.heads + g.first_head * length,
         .scale = 1.0f / std::sqrt(static_cast<float>(head_width)),
         .heads = g.heads,
         .sequence = length},
        stream_);
    ops_.multiply({.form = Form::kAB,
                   .m = length,
                   .n = head_width,
                   .k = length,
                   .a = arrays_.probabilities,
                   .a_stride = length,
                   .b = qkv(2),
                   .b_stride = 3 * width,
                   .result = block.attention +
                             (g.first_row * width + g.first_head * head_width) * type_bytes(),
                   .result_stride = width,
                   .result_type = ops_.type(),
                   .batch = g.heads,
                   .a_batch_stride = length * length,
                   .b_batch_stride = head_width,
                   .result_batch_stride = head_width},
                  stream_);
  });
}

// From the gradient of the attention's output, in d_narrow, to that of qkv, in d_wide.
void DeviceGpt::attention_backward(const Block& block) {
  const std::uint64_t length = shape_.sequence;
  const std::uint64_t width = config_.embedding;
  const std::uint64_t head_width = config_.head_width();
  for_each_group(shape_, config_.heads, head_group_, [&](const HeadGroup& g) {
    const std::uint64_t y_offset = (g.first_row * width + g.first_head * head_width) * type_bytes();
    const auto at = [&](std::byte* array, std::uint64_t part) {
      return array +
             (g.first_row * 3 * width + part * width + g.first_head * head_width) * type_bytes();
    };
    // [length, length] from two [length, head_width].
    const auto outer = [&](const std::byte* a, std::uint64_t a_stride, const std::byte* b,
                           float* result) {
      ops_.multiply({.form = Form::kABt,
                     .m = length,
                     .n = length,
                     .k = head_width,
                     .a = a,
                     .a_stride = a_stride,
                     .b = b,
                     .b_stride = 3 * width,
                     .result = result,
                     .result_stride = length,
                     .result_type = DType::kFp32,
                     .batch = g.heads,
                     .a_batch_stride = head_width,
                     .b_batch_stride = head_width,
                     .result_batch_stride = length * length},
                    stream_);
    };
    // [length, head_width] from [length, length] and [length, head_width].
    const auto inner = [&](Form form, const std::byte* a, const std::byte* b,
                           std::uint64_t b_stride, std::byte* result) {
      ops_.multiply({.form = form,
                     .m = length,
                     .n = head_width,
                     .k = length,
                     .a = a,
                     .a_stride = length,
                     .b = b,
                     .b_stride = b_stride,
                     .result = result,
                     .result_stride = 3 * width,
                     .result_type = ops_.type(),
                     .batch = g.heads,
                     .a_batch_stride = length * length,
                     .b_batch_stride = head_width,
                     .result_batch_stride = head_width},
                    stream_);
    };
    outer(at(block.qkv, 0), 3 * width, at(block.qkv, 1), arrays_.scores);
    outer(arrays_.d_narrow + y_offset, width, at(block.qkv, 2), arrays_.d_probabilities);
    ops_.softmax_backward({.forward = {.scores = arrays_.scores,
                                       .probabilities = arrays_.probabilities,
                                       .log_sums = block.log_sums + g.first_row * config_.heads +
                                                   g.first_head * length,
                                       .scale = 1.0f / std::sqrt(static_cast<float>(head_width)),
                                       .heads = g.heads,
                                       .sequence = length},
                           .d_probabilities = arrays_.d_probabilities,
                           .d_scores = arrays_.d_scores,
                           .y = block.attention + y_offset,
                           .dy = arrays_.d_narrow + y_offset,
                           .y_stride = width,
                           .head_width = head_width},
                          stream_);
    inner(Form::kAB, arrays_.d_scores, at(block.qkv, 1), 3 * width, at(arrays_.d_wide, 0));
    inner(Form::kAtB, arrays_.d_scores, at(block.qkv, 0), 3 * width, at(arrays_.d_wide, 1));
    inner(Form::kAtB, arrays_.probabilities, arrays_.d_narrow + y_offset, width,
          at(arrays_.d_wide, 2));
  });
}

}  // namespace sluice::gpt
