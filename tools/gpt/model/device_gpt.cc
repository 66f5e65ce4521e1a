#include "tools/gpt/model/device_gpt.h"

#include <algorithm>
#include <cmath>

#include <sluice/error.h>
#include <sluice/units.h>
#include "tools/gpt/model/gpt_model.h"

namespace sluice::gpt {
namespace {

// Scores and their gradient are fp32, probabilities and theirs of the type of activations.
std::uint64_t head_group_of(const GptConfig& config, BatchShape shape, DType type,
                            std::uint64_t scratch_bytes) {
  const std::uint64_t head_bytes =
      std::uint64_t{shape.sequence} * shape.sequence * 2 * (sizeof(float) + size_of(type));
  return std::clamp<std::uint64_t>(scratch_bytes / head_bytes, 1, config.heads);
}

}  // namespace

DeviceGpt::DeviceGpt(const GptConfig& config, BatchShape shape, Device& device, DeviceOps& ops,
                     std::uint64_t attention_scratch_bytes)
    : config_(checked(config, shape)),
      shape_(shape),
      spec_(gpt_model_spec(config)),
      device_(device),
      ops_(ops),
      head_group_(head_group_of(config, shape, ops.type(), attention_scratch_bytes)),
      memory_(device, carve(sizes(), nullptr, arrays_), "activations"),
      inputs_(config, shape, device),
      losses_(device) {
  (void)carve(sizes(), memory_.data(), arrays_);
  of_evaluation_ = places_of_evaluation();
  batches_.resize(of_evaluation_.size());
  inputs_.put_at(arrays_.inputs);
}

std::uint64_t DeviceGpt::activation_bytes_of(const GptConfig& config, BatchShape shape, DType type,
                                             std::uint64_t attention_scratch_bytes) {
  Arrays arrays;
  return carve({.config = checked(config, shape),
                .shape = shape,
                .type = type,
                .head_group = head_group_of(config, shape, type, attention_scratch_bytes)},
               nullptr, arrays);
}

// Everything starts at a multiple of 256 bytes.
std::uint64_t DeviceGpt::carve(const Sizes& sizes, std::byte* base, Arrays& arrays) {
  const GptConfig& config = sizes.config;
  const std::uint64_t rows = sizes.shape.rows();
  std::uint64_t used_bytes = 0;
  const auto take = [&](std::uint64_t count, std::uint64_t element_bytes) {
    std::byte* const piece = base == nullptr ? nullptr : base + used_bytes;
    used_bytes += align_up(count * element_bytes, 256);
    return piece;
  };
  const auto values = [&](std::uint64_t count) { return take(count, size_of(sizes.type)); };
  const auto floats = [&](std::uint64_t count) {
    return reinterpret_cast<float*>(take(count, sizeof(float)));
  };
  const auto moments = [&] {
    return reinterpret_cast<RowMoments*>(take(rows, sizeof(RowMoments)));
  };
  const std::uint64_t narrow = rows * config.embedding;
  arrays = {};
  for (std::uint32_t layer = 0; layer < config.layers; ++layer)
    arrays.blocks.push_back({.input = values(narrow),
                             .norm1_moments = moments(),
                             .norm1 = values(narrow),
                             .qkv = values(3 * narrow),
                             .log_sums = floats(rows * config.heads),
                             .attention = values(narrow),
                             .middle = values(narrow),
                             .norm2_moments = moments(),
                             .norm2 = values(narrow),
                             .mlp = values(4 * narrow),
                             .gelu = values(4 * narrow)});
  arrays.final_input = values(narrow);
  arrays.final_moments = moments();
  arrays.final_norm = values(narrow);
  arrays.logits = values(rows * logits_stride(config));
  arrays.row_losses = floats(rows);
  arrays.loss = reinterpret_cast<double*>(take(1, sizeof(double)));
  arrays.d_residual = values(narrow);
  arrays.d_narrow = values(narrow);
  arrays.d_wide = values(4 * narrow);
  // For the widest bias, or a norm's two parameters.
  arrays.partials = floats(sum_partials(rows, std::uint64_t{4} * config.embedding));
  const std::uint64_t scores = sizes.head_group * sizes.shape.sequence * sizes.shape.sequence;
  arrays.scores = floats(scores);
  arrays.d_probabilities = floats(scores);
  arrays.probabilities = values(scores);
  arrays.d_scores = values(scores);
  arrays.inputs = reinterpret_cast<std::uint32_t*>(
      take(DeviceInputs::count(config, sizes.shape), sizeof(std::uint32_t)));
  return used_bytes;
}

// In the same memory as Activations::of_evaluation.
std::vector<std::byte*> DeviceGpt::places_of_evaluation() const {
  const std::uint64_t value_bytes = align_up(rows() * config_.embedding * type_bytes(), 256);
  std::vector<std::byte*> places;
  const auto divide = [&](std::byte* begin, const void* end) {
    for (; begin + value_bytes <= end; begin += value_bytes) places.push_back(begin);
  };
  divide(config_.layers > 1 ? arrays_.blocks[1].input : arrays_.final_input, arrays_.final_moments);
  divide(arrays_.d_residual, arrays_.partials);
  return places;
}

DeviceGpt::Batch& DeviceGpt::start(Mode mode, std::span<const std::uint32_t> tokens,
                                   std::span<const std::uint32_t> targets, std::uint32_t batch) {
  SLUICE_CHECK(batch < batches_.size(), "one of the batches under way");
  SLUICE_CHECK(tokens.size() == rows() && targets.size() == rows(),
               "a micro-batch has batch * sequence tokens and as many targets");
  check_tokens(config_, tokens);
  check_tokens(config_, targets);
  inputs_.renew(batch);
  mode_ = mode;
  backward_uses_done_ = 0;
  return batches_[batch] = {.tokens = tokens, .targets = targets};
}

void DeviceGpt::start_evaluation(std::span<const std::uint32_t> tokens,
                                 std::span<const std::uint32_t> targets, std::uint32_t batch) {
  (void)start(Mode::kEvaluation, tokens, targets, batch);
}

void DeviceGpt::start_training(std::span<const std::uint32_t> tokens,
                               std::span<const std::uint32_t> targets, StreamId stream) {
  Batch& batch = start(Mode::kTraining, tokens, targets, 0);
  inputs_.bring_for_training(tokens, targets, stream);
  batch.tokens = batch.targets = {};  // the caller's memory
}

// In an evaluation, another batch may have come between the embedding and the logits.
void DeviceGpt::bring_inputs() {
  if (mode_ == Mode::kEvaluation)
    inputs_.bring(batch_, batches_[batch_].tokens, batches_[batch_].targets, stream_);
}

// The value that the block of `layer` takes; that of a layer behind the last is the final norm's.
std::byte* DeviceGpt::value_before(std::uint32_t layer) const {
  if (mode_ == Mode::kEvaluation) return of_evaluation_[batch_];
  return layer < config_.layers ? arrays_.blocks[layer].input : arrays_.final_input;
}

// The final norm's output. In an evaluation it overwrites the norm's input, element by element once
// each has been read.
std::byte* DeviceGpt::normed() const {
  return mode_ == Mode::kEvaluation ? of_evaluation_[batch_] : arrays_.final_norm;
}

DeviceGpt::Use DeviceGpt::kind_of(std::uint32_t forward_use) const {
  if (forward_use == 0) return Use::kEmbedding;
  if (forward_use <= config_.layers) return Use::kBlock;
  return forward_use == config_.layers + 1 ? Use::kHead : Use::kTiedLogits;
}

void DeviceGpt::forward(std::uint32_t use, ParameterPointers parameters, StreamId stream,
                        std::uint32_t batch) {
  SLUICE_CHECK(batch < (mode_ == Mode::kEvaluation ? batches_.size() : 1),
               "one of the batches under way");
  SLUICE_CHECK(use == batches_[batch].forward_uses_done && use < use_count(),
               "forward uses come in order, after a start");
  ++batches_[batch].forward_uses_done;
  batch_ = batch;
  parameters_ = parameters;
  stream_ = stream;
  switch (kind_of(use)) {
    case Use::kEmbedding:
      bring_inputs();
      ops_.embedding_forward({.tokens = inputs_.tokens(),
                              .token_table = parameters[kWte],
                              .position_table = parameters[kWpe],
                              .y = value_before(0),
                              .rows = rows(),
                              .sequence = shape_.sequence,
                              .width = config_.embedding},
                             stream_);
      break;
    case Use::kBlock: block_forward(use - 1); break;
    case Use::kHead:
      norm(value_before(config_.layers), kFinalNormWeight, normed(), arrays_.final_moments);
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

void DeviceGpt::block_forward(std::uint32_t layer) {
  const Block& a = arrays_.blocks[mode_ == Mode::kEvaluation ? 0 : layer];
  const std::uint64_t width = config_.embedding;
  std::byte* const input = value_before(layer);
  norm(input, kLn1Weight, a.norm1, a.norm1_moments);
  linear(a.norm1, width, kAttentionWeight, a.qkv, 3 * width, nullptr);
  attention_forward(a);
  linear(a.attention, width, kAttentionProjectionWeight, a.middle, width, input);
  norm(a.middle, kLn2Weight, a.norm2, a.norm2_moments);
  linear(a.norm2, width, kMlpWeight, a.mlp, 4 * width, nullptr);
  ops_.gelu_forward(a.mlp, a.gelu, rows() * 4 * width, stream_);
  linear(a.gelu, 4 * width, kMlpProjectionWeight, value_before(layer + 1), width, a.middle);
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
                 .result_stride = logits_stride(),
                 .result_type = ops_.type()},
                stream_);
  ops_.cross_entropy({.logits = arrays_.logits,
                      .targets = inputs_.targets(),
                      .row_losses = arrays_.row_losses,
                      .loss = arrays_.loss,
                      .gradient = mode_ == Mode::kTraining,
                      .gradient_scale = loss_scale_,
                      .rows = rows(),
                      .vocabulary = config_.vocabulary,
                      .stride = logits_stride()},
                     stream_);
}

void DeviceGpt::keep_loss(StreamId stream) {
  SLUICE_CHECK(batches_[batch_].forward_uses_done == use_count(),
               "the loss is known after the last forward use");
  losses_.keep(arrays_.loss, stream);
}

}  // namespace sluice::gpt
