// The backward pass of DeviceGpt: forward read from the end.
#include <sluice/error.h>
#include "tools/gpt/model/device_gpt.h"
#include "tools/gpt/model/gpt_model.h"

namespace sluice::gpt {

void DeviceGpt::backward(std::uint32_t use, ParameterPointers parameters,
                         GradientPointers gradients, StreamId stream,
                         const DeviceBoundaries& boundaries) {
  SLUICE_CHECK(boundaries.micro_batch < options_.micro_batches,
               "one of the micro-batches under way");
  Batch& batch = batches_[boundaries.micro_batch];
  SLUICE_CHECK(mode_ == Mode::kTraining && batch.forward_uses_done == use_count(),
               "backward follows a whole forward pass of training");
  SLUICE_CHECK(use == batch.backward_uses_done && use < use_count(), "backward uses come in order");
  ++batch.backward_uses_done;
  parameters_ = parameters;
  gradients_ = gradients;
  stream_ = stream;
  const std::uint32_t forward_use = use_count() - 1 - use;
  select_backward(forward_use, boundaries);
  switch (kind_of(forward_use)) {
    case Use::kTiedLogits:
      logits_backward(parameters[kWte], gradients[kWte]);
      device_.fill_zero(
          gradients[kWpe],
          std::uint64_t{config_.context} * config_.embedding * size_of(ops_.gradient_type()),
          stream_);
      break;
    case Use::kHead:
      if (final_norm_of_ != batch_) {  // other micro-batches have come since forward
        output_ = arrays_.final_norm;
        final_norm_forward();
      }
      if (!config_.tied_head) logits_backward(parameters[kLmHeadWeight], gradients[kLmHeadWeight]);
      norm_backward(input_, arrays_.final_moments, kFinalNormWeight,
                    config_.tied_head ? output_gradient_ : arrays_.d_narrow, Into::kOverwrite);
      break;
    case Use::kBlock: block_backward(forward_use - 1); break;
    case Use::kEmbedding: embedding_backward_use(); break;
  }
}

// From the gradient of the logits to that of the final norm's output, which is a boundary with a
// tied head.
void DeviceGpt::logits_backward(const std::byte* table, std::byte* table_gradient) {
  if (logits_of_ != batch_) logits_forward(table);
  const std::uint64_t width = config_.embedding;
  const std::uint64_t vocabulary = config_.vocabulary;
  ops_.multiply({.form = Form::kAtB,
                 .m = vocabulary,
                 .n = width,
                 .k = rows(),
                 .a = arrays_.logits,
                 .a_stride = DeviceActivations::logits_stride(config_),
                 .b = normed(),
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
                 .a_stride = DeviceActivations::logits_stride(config_),
                 .b = table,
                 .b_stride = width,
                 .result = config_.tied_head ? input_gradient_ : arrays_.d_narrow,
                 .result_stride = width,
                 .result_type = ops_.type()},
                stream_);
}

// From the gradient `dy` of a norm's output to that of the use's input.
void DeviceGpt::norm_backward(const std::byte* x, const RowMoments* moments, std::uint32_t weight,
                              const std::byte* dy, Into into) {
  ops_.layer_norm_backward({.x = x,
                            .moments = moments,
                            .weight = parameters_[weight],
                            .dy = dy,
                            .dx = input_gradient_,
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

// The gradient of the residual stream comes in as that of the block's output and leaves as that of
// its input.
void DeviceGpt::block_backward(std::uint32_t layer) {
  const DeviceBlock& a = arrays_.block(layer);
  const std::uint64_t width = config_.embedding;
  if (has_checkpoints()) {
    recompute_block(layer);
    device_.copy(input_gradient_, output_gradient_, rows() * width * type_bytes(), stream_);
  }
  std::byte* const d_residual = input_gradient_;
  linear_backward(a.gelu, 4 * width, d_residual, width, kMlpProjectionWeight, arrays_.d_wide);
  ops_.gelu_backward(a.mlp, arrays_.d_wide, rows() * 4 * width, stream_);
  linear_backward(a.norm2, width, arrays_.d_wide, 4 * width, kMlpWeight, arrays_.d_narrow);
  norm_backward(a.middle, a.norm2_moments, kLn2Weight, arrays_.d_narrow, Into::kAccumulate);
  linear_backward(a.attention, width, d_residual, width, kAttentionProjectionWeight,
                  arrays_.d_narrow);
  attention_backward(a);
  linear_backward(a.norm1, width, arrays_.d_wide, 3 * width, kAttentionWeight, arrays_.d_narrow);
  norm_backward(input_, a.norm1_moments, kLn1Weight, arrays_.d_narrow, Into::kAccumulate);
}

void DeviceGpt::embedding_backward_use() {
  ops_.embedding_backward({.order = inputs_.order(batch_),
                           .begin = inputs_.begin(batch_),
                           .dy = output_gradient_,
                           .token_gradient = gradients_[kWte],
                           .position_gradient = gradients_[kWpe],
                           .rows = rows(),
                           .sequence = shape_.sequence,
                           .width = config_.embedding,
                           .vocabulary = config_.vocabulary,
                           .context = config_.context},
                          stream_);
}

}  // namespace sluice::gpt
