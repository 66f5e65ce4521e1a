// The backward pass of GptCompute: forward read from the end.
#include <cstring>

#include <sluice/error.h>
#include "tools/gpt/model/attention.h"
#include "tools/gpt/model/gpt_compute.h"
#include "tools/gpt/model/layers.h"

namespace sluice::gpt {

void GptCompute::backward(std::uint32_t use, ParameterPointers parameters,
                          GradientPointers gradients, const Boundaries& boundaries) {
  SLUICE_CHECK(use < use_count(), "backward uses come in order");
  const std::uint32_t forward_use = use_count() - 1 - use;
  select(forward_use, boundaries);
  SLUICE_CHECK(mode_ == Mode::kTraining && batch_->forward_uses_done == use_count(),
               "backward follows a whole forward pass of training");
  SLUICE_CHECK(use == batch_->backward_uses_done, "backward uses come in order");
  ++batch_->backward_uses_done;
  const std::uint32_t unit = index_of(spec_.backward_order[use]);
  const Use kind = kind_of(forward_use);
  if (kind != Use::kEmbedding) tensors_.load(unit, parameters);
  tensors_.open_gradients(unit, gradients);
  switch (kind) {
    case Use::kTiedLogits:
      recompute_logits(tensors_.factor(kWte));
      logits_backward(kWte);
      fill_zero(threads_, tensors_.gradient(kWpe),
                std::uint64_t{config_.context} * config_.embedding);
      break;
    case Use::kHead:
      recompute_final_norm();
      if (!config_.tied_head) {
        recompute_logits(tensors_.factor(kLmHeadWeight));
        logits_backward(kLmHeadWeight);
      }
      final_norm_backward();
      break;
    case Use::kBlock: block_backward(forward_use - 1); break;
    case Use::kEmbedding: embedding_backward_use(); break;
  }
  tensors_.store_gradients(gradients);
}

// Where other micro-batches have come between forward and backward.
void GptCompute::recompute_final_norm() {
  if (final_norm_of_ == micro_batch_) return;
  output_ = nullptr;
  final_norm_forward();
}

void GptCompute::recompute_logits(const void* table) {
  if (logits_of_ != micro_batch_) logits_forward(table);
}

// From the gradient of the logits to that of the final norm's output: a boundary with a tied head.
void GptCompute::logits_backward(std::uint32_t table) {
  const std::uint64_t width = config_.embedding;
  const std::uint64_t vocabulary = config_.vocabulary;
  const ConstMatrix d_logits = logits_gradient();
  const float* normed = config_.tied_head ? input_ : activations_.final_norm;
  float* d_normed = config_.tied_head ? d_input_ : activations_.d_narrow;
  products_.multiply(Form::kAtB, d_logits, factor(normed, rows(), width, activations_.input_factor),
                     weight_gradient(table, vocabulary, width));
  products_.multiply(Form::kAB, d_logits, weight_factor(tensors_.factor(table), vocabulary, width),
                     {d_normed, rows(), width, width});
}

// Rows in bf16 begin where those in fp32 began.
ConstMatrix GptCompute::logits_gradient() const {
  const std::uint64_t vocabulary = config_.vocabulary;
  const std::uint64_t stride = vocabulary * sizeof(float) / size_of(factor_type());
  return {activations_.logits, rows(), vocabulary, stride, factor_type()};
}

Matrix GptCompute::weight_gradient(std::uint32_t tensor, std::uint64_t rows,
                                   std::uint64_t columns) {
  const GradientTarget target = tensors_.product_gradient(tensor);
  return {target.data, rows, columns, columns, target.dtype};
}

void GptCompute::final_norm_backward() {
  layer_norm_backward(threads_, {.rows = rows(), .columns = config_.embedding},
                      {.x = input_,
                       .moments = activations_.final_moments,
                       .weight = tensors_.parameter(kFinalNormWeight)},
                      config_.tied_head ? d_output_ : activations_.d_narrow,
                      {.x = d_input_,
                       .into = Into::kOverwrite,
                       .weight = tensors_.gradient(kFinalNormWeight),
                       .bias = tensors_.gradient(kFinalNormBias)});
}

// A weight's bias is the tensor behind it.
void GptCompute::linear_backward(const float* x, std::uint64_t x_width, const float* dy,
                                 std::uint32_t weight, float* dx) {
  const std::uint32_t bias = weight + 1;
  const std::uint64_t y_width =
      spec_.units[1].tensors[bias].element_count();  // every block has the same shapes
  const ConstMatrix d_output = factor(dy, rows(), y_width, activations_.gradient_factor);
  products_.multiply(Form::kAtB, factor(x, rows(), x_width, activations_.input_factor), d_output,
                     weight_gradient(weight, x_width, y_width));
  bias_backward(threads_, {.rows = rows(), .columns = y_width}, dy, tensors_.gradient(bias));
  products_.multiply(Form::kABt, d_output, weight_factor(tensors_.factor(weight), x_width, y_width),
                     {dx, rows(), x_width, x_width});
}

void GptCompute::recompute_block(std::uint32_t layer) {
  output_ = nullptr;
  block_forward(layer);
}

void GptCompute::block_backward(std::uint32_t layer) {
  if (checkpoints_ == Checkpoints::kUnits) recompute_block(layer);
  if (d_input_ != d_output_)
    std::memcpy(d_input_, d_output_, rows() * config_.embedding * sizeof(float));
  mlp_backward(layer);
  attention_part_backward(layer);
}

// d_input_ comes in as the gradient of the block's output and leaves as that of `middle`.
void GptCompute::mlp_backward(std::uint32_t layer) {
  const BlockActivations& a = activations_.block(layer);
  const std::uint64_t width = config_.embedding;
  linear_backward(a.gelu, 4 * width, d_input_, kMlpProjectionWeight, activations_.d_wide);
  gelu_backward(threads_, a.mlp, activations_.d_wide, rows() * 4 * width);
  linear_backward(a.norm2, width, activations_.d_wide, kMlpWeight, activations_.d_narrow);
  layer_norm_backward(
      threads_, {.rows = rows(), .columns = width},
      {.x = a.middle, .moments = a.norm2_moments, .weight = tensors_.parameter(kLn2Weight)},
      activations_.d_narrow,
      {.x = d_input_,
       .into = Into::kAccumulate,
       .weight = tensors_.gradient(kLn2Weight),
       .bias = tensors_.gradient(kLn2Bias)});
}

// d_input_ comes in as the gradient of `middle` and leaves as that of the block's input.
void GptCompute::attention_part_backward(std::uint32_t layer) {
  const BlockActivations& a = activations_.block(layer);
  const std::uint64_t width = config_.embedding;
  linear_backward(a.attention, width, d_input_, kAttentionProjectionWeight, activations_.d_narrow);
  attention_backward(products_,
                     {rows() / sequence_, sequence_, config_.heads, config_.head_width()},
                     {.qkv = a.qkv, .y = a.attention, .log_sums = a.log_sums},
                     activations_.d_narrow, activations_.d_wide, activations_.attention_scratch);
  linear_backward(a.norm1, width, activations_.d_wide, kAttentionWeight, activations_.d_narrow);
  layer_norm_backward(
      threads_, {.rows = rows(), .columns = width},
      {.x = input_, .moments = a.norm1_moments, .weight = tensors_.parameter(kLn1Weight)},
      activations_.d_narrow,
      {.x = d_input_,
       .into = Into::kAccumulate,
       .weight = tensors_.gradient(kLn1Weight),
       .bias = tensors_.gradient(kLn1Bias)});
}

void GptCompute::embedding_backward_use() {
  embedding_backward(threads_, batch_->tokens, sequence_, config_.embedding, d_output_,
                     {.token = tensors_.gradient(kWte),
                      .position = tensors_.gradient(kWpe),
                      .vocabulary = config_.vocabulary,
                      .context = config_.context});
}

}  // namespace sluice::gpt
