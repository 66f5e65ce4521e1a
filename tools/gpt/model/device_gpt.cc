#include "tools/gpt/model/device_gpt.h"

#include <algorithm>
#include <cmath>

#include <sluice/error.h>
#include <sluice/units.h>
#include "tools/gpt/model/gpt_model.h"

namespace sluice::gpt {
namespace {

// Scores and their gradient are fp32, probabilities and theirs of the type of activations. Groups
// of several sequences are as equal as can be, because a group of another size has other products.
HeadGroup head_group_of(const GptConfig& config, BatchShape shape, DType type,
                        std::uint64_t scratch_bytes) {
  const std::uint64_t head_bytes =
      std::uint64_t{shape.sequence} * shape.sequence * 2 * (sizeof(float) + size_of(type));
  const std::uint64_t heads_max = std::max<std::uint64_t>(scratch_bytes / head_bytes, 1);
  if (heads_max < config.heads) return {.sequences = 1, .heads = heads_max};
  const std::uint64_t groups = div_ceil(shape.batch, heads_max / config.heads);
  return {.sequences = div_ceil(shape.batch, groups), .heads = config.heads};
}

}  // namespace

DeviceGpt::DeviceGpt(const GptConfig& config, BatchShape shape, Device& device, DeviceOps& ops,
                     const DeviceGptOptions& options)
    : config_(checked(config, shape)),
      shape_(shape),
      options_(options),
      spec_(gpt_model_spec(config)),
      device_(device),
      ops_(ops),
      head_group_(head_group_of(config, shape, ops.type(), options.attention_scratch_bytes)),
      arrays_({.config = config_,
               .shape = shape,
               .type = ops.type(),
               .head_group = head_group_.count(),
               .checkpoints = options.checkpoints,
               .micro_batches = options.micro_batches},
              device),
      inputs_(config, shape, device),
      losses_(device) {
  SLUICE_CHECK(has_checkpoints() || options.micro_batches == 1,
               "several micro-batches at a time need checkpoints");
  batches_.resize(std::max<std::size_t>(arrays_.of_evaluation.size(), options.micro_batches));
  inputs_.put_at(arrays_.inputs);
}

std::uint64_t DeviceGpt::activation_bytes_of(const GptConfig& config, BatchShape shape, DType type,
                                             const DeviceGptOptions& options) {
  return DeviceActivations::size_bytes(
      {.config = checked(config, shape),
       .shape = shape,
       .type = type,
       .head_group = head_group_of(config, shape, type, options.attention_scratch_bytes).count(),
       .checkpoints = options.checkpoints,
       .micro_batches = options.micro_batches});
}

DeviceGpt::Batch& DeviceGpt::start(Mode mode, std::span<const std::uint32_t> tokens,
                                   std::span<const std::uint32_t> targets, std::uint32_t batch) {
  SLUICE_CHECK(batch < batches_.size(), "one of the batches under way");
  SLUICE_CHECK(mode == Mode::kEvaluation ? shape_.takes(tokens.size()) : tokens.size() == rows(),
               "a micro-batch has batch * sequence tokens, in an evaluation maybe fewer sequences");
  SLUICE_CHECK(targets.size() == tokens.size(), "a target for each token");
  check_tokens(config_, tokens);
  check_tokens(config_, targets);
  inputs_.renew(batch);
  mode_ = mode;
  return batches_[batch] = {.tokens = tokens, .targets = targets, .rows = tokens.size()};
}

void DeviceGpt::start_evaluation(std::span<const std::uint32_t> tokens,
                                 std::span<const std::uint32_t> targets, std::uint32_t batch) {
  (void)start(Mode::kEvaluation, tokens, targets, batch);
}

void DeviceGpt::start_training(std::span<const std::uint32_t> tokens,
                               std::span<const std::uint32_t> targets, StreamId stream,
                               std::uint32_t micro_batch) {
  SLUICE_CHECK(micro_batch < options_.micro_batches, "one of the micro-batches under way");
  Batch& batch = start(Mode::kTraining, tokens, targets, micro_batch);
  inputs_.bring_for_training(micro_batch, tokens, targets, stream);
  batch.tokens = batch.targets = {};  // the caller's memory
}

// In an evaluation, another batch may have come between the embedding and the logits.
void DeviceGpt::bring_inputs() {
  if (mode_ == Mode::kEvaluation)
    inputs_.bring(batch_, batches_[batch_].tokens, batches_[batch_].targets, stream_);
}

void DeviceGpt::select_forward(std::uint32_t use, const DeviceBoundaries& boundaries) {
  batch_ = boundaries.micro_batch;
  if (mode_ == Mode::kEvaluation) {
    // The final norm overwrites its input, element by element once each has been read.
    input_ = output_ = arrays_.of_evaluation[batch_];
  } else if (has_checkpoints()) {
    input_ = boundaries.input;
    output_ =
        kind_of(use) == Use::kHead && !config_.tied_head ? arrays_.final_norm : boundaries.output;
  } else {
    input_ = use == 0 ? nullptr : arrays_.output_of(use - 1);
    output_ = arrays_.output_of(use);
  }
}

void DeviceGpt::select_backward(std::uint32_t forward_use, const DeviceBoundaries& boundaries) {
  select_forward(forward_use, boundaries);
  if (has_checkpoints()) {
    output_gradient_ = boundaries.output_gradient;
    input_gradient_ = boundaries.input_gradient;
  } else {
    output_gradient_ = arrays_.output_gradient_of(forward_use);
    input_gradient_ = forward_use == 0 ? nullptr : arrays_.output_gradient_of(forward_use - 1);
  }
}

DeviceGpt::Use DeviceGpt::kind_of(std::uint32_t forward_use) const {
  if (forward_use == 0) return Use::kEmbedding;
  if (forward_use <= config_.layers) return Use::kBlock;
  return forward_use == config_.layers + 1 ? Use::kHead : Use::kTiedLogits;
}

void DeviceGpt::forward(std::uint32_t use, ParameterPointers parameters, StreamId stream,
                        const DeviceBoundaries& boundaries) {
  const std::uint32_t batch = boundaries.micro_batch;
  SLUICE_CHECK(
      batch < (mode_ == Mode::kEvaluation ? arrays_.of_evaluation.size() : options_.micro_batches),
      "one of the batches under way");
  SLUICE_CHECK(use == batches_[batch].forward_uses_done && use < use_count(),
               "forward uses come in order, after a start");
  ++batches_[batch].forward_uses_done;
  select_forward(use, boundaries);
  parameters_ = parameters;
  stream_ = stream;
  switch (kind_of(use)) {
    case Use::kEmbedding:
      bring_inputs();
      ops_.embedding_forward({.tokens = inputs_.tokens(place_of_inputs()),
                              .token_table = parameters[kWte],
                              .position_table = parameters[kWpe],
                              .y = output_,
                              .rows = rows(),
                              .sequence = shape_.sequence,
                              .width = config_.embedding},
                             stream_);
      break;
    case Use::kBlock: block_forward(use - 1); break;
    case Use::kHead:
      final_norm_forward();
      if (!config_.tied_head) logits_forward(parameters[kLmHeadWeight]);
      break;
    case Use::kTiedLogits: logits_forward(parameters[kWte]); break;
  }
}

void DeviceGpt::norm(const std::byte* x, std::uint32_t weight, std::byte* y, RowMoments* moments) {
  ops_.layer_norm_forward({.x = x,
                           .weight = parameters_[weight],
                           .bias = parameters_[weight + 1],
                           .y = y,
                           .moments = moments,
                           .rows = rows(),
                           .width = config_.embedding},
                          stream_);
}

// y = x W + b, plus the residual.
void DeviceGpt::linear(const std::byte* x, std::uint64_t x_width, std::uint32_t weight,
                       std::byte* y, std::uint64_t y_width, const std::byte* residual) {
  ops_.multiply({.form = Form::kAB,
                 .m = rows(),
                 .n = y_width,
                 .k = x_width,
                 .a = x,
                 .a_stride = x_width,
                 .b = parameters_[weight],
                 .b_stride = y_width,
                 .result = y,
                 .result_stride = y_width,
                 .result_type = ops_.type(),
                 .bias = parameters_[weight + 1],
                 .addend = residual},
                stream_);
}

void DeviceGpt::final_norm_forward() {
  norm(input_, kFinalNormWeight, output_, arrays_.final_moments);
  final_norm_of_ = batch_;
}

void DeviceGpt::block_forward(std::uint32_t layer) {
  const DeviceBlock& a = block(layer);
  recompute_block(layer);
  linear(a.gelu, 4 * config_.embedding, kMlpProjectionWeight, output_, config_.embedding, a.middle);
}

// Computes all that a block's backward pass reads.
void DeviceGpt::recompute_block(std::uint32_t layer) {
  const DeviceBlock& a = block(layer);
  const std::uint64_t width = config_.embedding;
  norm(input_, kLn1Weight, a.norm1, a.norm1_moments);
  linear(a.norm1, width, kAttentionWeight, a.qkv, 3 * width, nullptr);
  attention_forward(a);
  linear(a.attention, width, kAttentionProjectionWeight, a.middle, width, input_);
  norm(a.middle, kLn2Weight, a.norm2, a.norm2_moments);
  linear(a.norm2, width, kMlpWeight, a.mlp, 4 * width, nullptr);
  ops_.gelu_forward(a.mlp, a.gelu, rows() * 4 * width, stream_);
}

void DeviceGpt::logits_forward(const std::byte* table) {
  const std::uint64_t width = config_.embedding;
  bring_inputs();  // the targets
  ops_.multiply({.form = Form::kABt,
                 .m = rows(),
                 .n = config_.vocabulary,
                 .k = width,
                 .a = normed(),
                 .a_stride = width,
                 .b = table,
                 .b_stride = width,
                 .result = arrays_.logits,
                 .result_stride = DeviceActivations::logits_stride(config_),
                 .result_type = ops_.type()},
                stream_);
  ops_.cross_entropy({.logits = arrays_.logits,
                      .targets = inputs_.targets(place_of_inputs()),
                      .row_losses = arrays_.row_losses,
                      .loss = arrays_.loss,
                      .gradient = mode_ == Mode::kTraining,
                      .gradient_scale = loss_scale_,
                      .rows = batches_[batch_].rows,
                      .vocabulary = config_.vocabulary,
                      .stride = DeviceActivations::logits_stride(config_)},
                     stream_);
  logits_of_ = batch_;
}

void DeviceGpt::keep_loss(StreamId stream) {
  SLUICE_CHECK(batches_[batch_].forward_uses_done == use_count(),
               "the loss is known after the last forward use");
  losses_.keep(arrays_.loss, stream);
}

}  // namespace sluice::gpt
