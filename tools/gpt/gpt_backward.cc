// The backward pass of GptCompute: forward read from the end.
#include "base/error.h"
#include "tools/gpt/attention.h"
#include "tools/gpt/gpt_compute.h"
#include "tools/gpt/layers.h"

namespace sluice::gpt {

void GptCompute::backward(std::uint32_t use, ParameterPointers parameters,
                          GradientPointers gradients) {
  SLUICE_CHECK(mode_ == Mode::kTraining && forward_uses_done_ == use_count(),
               "backward follows a whole forward pass of training");
  SLUICE_CHECK(use == backward_uses_done_ && use < use_count(), "backward uses come in order");
  ++backward_uses_done_;
  const std::uint32_t forward_use = use_count() - 1 - use;
  const std::uint32_t unit = index_of(spec_.backward_order[use]);
  const Use kind = kind_of(forward_use);
  if (kind != Use::kEmbedding) tensors_.load(unit, parameters);
  tensors_.open_gradients(unit, gradients);
  switch (kind) {
    case Use::kTiedLogits:
      logits_backward(tensors_.parameter(kWte), tensors_.gradient(kWte));
      fill_zero(threads_, tensors_.gradient(kWpe),
                std::uint64_t{config_.context} * config_.embedding);
      break;
    case Use::kHead:
      if (!config_.tied_head)
        logits_backward(tensors_.parameter(kLmHeadWeight), tensors_.gradient(kLmHeadWeight));
      final_norm_backward();
      break;
    case Use::kBlock: block_backward(forward_use - 1); break;
    case Use::kEmbedding: embedding_backward_use(); break;
  }
  tensors_.store_gradients(gradients);
}

// From the gradient of the logits to that of the final norm's output, in d_narrow.
void GptCompute::logits_backward(const float* table, float* table_gradient) {
  const std::uint64_t width = config_.embedding;
  const std::uint64_t vocabulary = config_.vocabulary;
  const ConstMatrix d_logits{activations_.logits, rows(), vocabulary, vocabulary};
  multiply(threads_, Form::kAtB, d_logits, {activations_.final_norm, rows(), width, width},
           {table_gradient, vocabulary, width, width});
  multiply(threads_, Form::kAB, d_logits, {table, vocabulary, width, width},
           {activations_.d_narrow, rows(), width, width});
}

void GptCompute::final_norm_backward() {
  layer_norm_backward(threads_, {.rows = rows(), .columns = config_.embedding},
                      {.x = activations_.final_input,
                       .moments = activations_.final_moments,
                       .weight = tensors_.parameter(kFinalNormWeight)},
                      activations_.d_narrow,
                      {.x = activations_.d_residual,
                       .into = Into::kOverwrite,
                       .weight = tensors_.gradient(kFinalNormWeight),
                       .bias = tensors_.gradient(kFinalNormBias)});
}

void GptCompute::linear_backward(ConstMatrix x, const float* dy, std::uint32_t weight,
                                 std::uint32_t bias, float* dx) {
  const std::uint64_t y_width =
      spec_.units[1].tensors[bias].element_count();  // every block has the same shapes
  const ConstMatrix d_output{dy, x.rows, y_width, y_width};
  multiply(threads_, Form::kAtB, x, d_output,
           {tensors_.gradient(weight), x.columns, y_width, y_width});
  bias_backward(threads_, {.rows = x.rows, .columns = y_width}, dy, tensors_.gradient(bias));
  multiply(threads_, Form::kABt, d_output,
           {tensors_.parameter(weight), x.columns, y_width, y_width},
           {dx, x.rows, x.columns, x.columns});
}

void GptCompute::block_backward(std::uint32_t layer) {
  mlp_backward(layer);
  attention_part_backward(layer);
}

// d_residual comes in as the gradient of the block's output and leaves as that of `middle`.
void GptCompute::mlp_backward(std::uint32_t layer) {
  const BlockActivations& a = activations_.blocks[layer];
  const std::uint64_t width = config_.embedding;
  linear_backward({a.gelu, rows(), 4 * width, 4 * width}, activations_.d_residual,
                  kMlpProjectionWeight, kMlpProjectionBias, activations_.d_wide);
  gelu_backward(threads_, a.mlp, activations_.d_wide, rows() * 4 * width);
  linear_backward({a.norm2, rows(), width, width}, activations_.d_wide, kMlpWeight, kMlpBias,
                  activations_.d_narrow);
  layer_norm_backward(
      threads_, {.rows = rows(), .columns = width},
      {.x = a.middle, .moments = a.norm2_moments, .weight = tensors_.parameter(kLn2Weight)},
      activations_.d_narrow,
      {.x = activations_.d_residual,
       .into = Into::kAccumulate,
       .weight = tensors_.gradient(kLn2Weight),
       .bias = tensors_.gradient(kLn2Bias)});
}

// d_residual comes in as the gradient of `middle` and leaves as that of the block's input.
void GptCompute::attention_part_backward(std::uint32_t layer) {
  const BlockActivations& a = activations_.blocks[layer];
  const std::uint64_t width = config_.embedding;
  linear_backward({a.attention, rows(), width, width}, activations_.d_residual,
                  kAttentionProjectionWeight, kAttentionProjectionBias, activations_.d_narrow);
  attention_backward(threads_, {rows() / sequence_, sequence_, config_.heads, config_.head_width()},
                     {.qkv = a.qkv, .y = a.attention, .log_sums = a.log_sums},
                     activations_.d_narrow, activations_.d_wide, activations_.attention_scratch);
  linear_backward({a.norm1, rows(), width, width}, activations_.d_wide, kAttentionWeight,
                  kAttentionBias, activations_.d_narrow);
  layer_norm_backward(
      threads_, {.rows = rows(), .columns = width},
      {.x = a.input, .moments = a.norm1_moments, .weight = tensors_.parameter(kLn1Weight)},
      activations_.d_narrow,
      {.x = activations_.d_residual,
       .into = Into::kAccumulate,
       .weight = tensors_.gradient(kLn1Weight),
       .bias = tensors_.gradient(kLn1Bias)});
}

void GptCompute::embedding_backward_use() {
  embedding_backward(threads_, tokens_, sequence_, config_.embedding, activations_.d_residual,
                     {.token = tensors_.gradient(kWte),
                      .position = tensors_.gradient(kWpe),
                      .vocabulary = config_.vocabulary,
                      .context = config_.context});
}

}  // namespace sluice::gpt
