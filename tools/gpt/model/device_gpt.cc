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
      host_(align_up(input_count(config, shape) * sizeof(std::uint32_t), 256) + sizeof(double),
            "tokens on their way to the device"),
      uploaded_(device) {
  (void)carve(sizes(), memory_.data(), arrays_);
  device_.register_host_memory(host_.span());
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
      take(input_count(config, sizes.shape), sizeof(std::uint32_t)));
  return used_bytes;
}

DeviceGpt::~DeviceGpt() {
  device_.unregister_host_memory(host_.span());
}

void DeviceGpt::start(Mode mode, std::span<const std::uint32_t> tokens,
                      std::span<const std::uint32_t> targets, StreamId stream) {
  SLUICE_CHECK(tokens.size() == rows() && targets.size() == rows(),
               "a micro-batch has batch * sequence tokens and as many targets");
  check_tokens(config_, tokens);
  check_tokens(config_, targets);
  device_.synchronize(uploaded_.id());
  auto* const inputs = reinterpret_cast<std::uint32_t*>(host_.data());
  std::copy(tokens.begin(), tokens.end(), inputs);
  std::copy(targets.begin(), targets.end(), inputs + rows());
  // Counting sort: which positions have each token, in the order of the batch.
  std::uint32_t* const order = inputs + 2 * rows();
  std::uint32_t* const begin = inputs + 3 * rows();
  std::fill_n(begin, config_.vocabulary + 1, 0u);
  for (const std::uint32_t token : tokens) ++begin[token + 1];
  for (std::uint32_t token = 0; token < config_.vocabulary; ++token)
    begin[token + 1] += begin[token];
  std::vector<std::uint32_t> next(begin, begin + config_.vocabulary);
  for (std::size_t i = 0; i < tokens.size(); ++i)
    order[next[tokens[i]]++] = static_cast<std::uint32_t>(i);
  device_.copy(reinterpret_cast<std::byte*>(arrays_.inputs), host_.data(),
               input_count(config_, shape_) * sizeof(std::uint32_t), stream);
  device_.record(uploaded_.id(), stream);
  mode_ = mode;
  forward_uses_done_ = 0;
  backward_uses_done_ = 0;
}

DeviceGpt::Use DeviceGpt::kind_of(std::uint32_t forward_use) const {
  if (forward_use == 0) return Use::kEmbedding;
  if (forward_use <= config_.layers) return Use::kBlock;
  return forward_use == config_.layers + 1 ? Use::kHead : Use::kTiedLogits;
}

void DeviceGpt::forward(std::uint32_t use, ParameterPointers parameters, StreamId stream) {
  SLUICE_CHECK(use == forward_uses_done_ && use < use_count(),
               "forward uses come in order, after a start");
  ++forward_uses_done_;
  parameters_ = parameters;
  stream_ = stream;
  switch (kind_of(use)) {
    case Use::kEmbedding:
      ops_.embedding_forward({.tokens = tokens(),
                              .token_table = parameters[kWte],
                              .position_table = parameters[kWpe],
                              .y = arrays_.blocks[0].input,
                              .rows = rows(),
                              .sequence = shape_.sequence,
                              .width = config_.embedding},
                             stream_);
      break;
    case Use::kBlock: block_forward(use - 1); break;
    case Use::kHead:
      norm(arrays_.final_input, kFinalNormWeight, arrays_.final_norm, arrays_.final_moments);
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
  const Block& a = arrays_.blocks[layer];
  const std::uint64_t width = config_.embedding;
  std::byte* const output =
      layer + 1 < config_.layers ? arrays_.blocks[layer + 1].input : arrays_.final_input;
  norm(a.input, kLn1Weight, a.norm1, a.norm1_moments);
  linear(a.norm1, width, kAttentionWeight, a.qkv, 3 * width, nullptr);
  attention_forward(a);
  linear(a.attention, width, kAttentionProjectionWeight, a.middle, width, a.input);
  norm(a.middle, kLn2Weight, a.norm2, a.norm2_moments);
  linear(a.norm2, width, kMlpWeight, a.mlp, 4 * width, nullptr);
  ops_.gelu_forward(a.mlp, a.gelu, rows() * 4 * width, stream_);
  linear(a.gelu, 4 * width, kMlpProjectionWeight, output, width, a.middle);
}

void DeviceGpt::logits_forward(const std::byte* table) {
  const std::uint64_t width = config_.embedding;
  ops_.multiply({.form = Form::kABt,
                 .m = rows(),
                 .n = config_.vocabulary,
                 .k = width,
                 .a = arrays_.final_norm,
                 .a_stride = width,
                 .b = table,
                 .b_stride = width,
                 .result = arrays_.logits,
                 .result_stride = logits_stride(),
                 .result_type = ops_.type()},
                stream_);
  ops_.cross_entropy({.logits = arrays_.logits,
                      .targets = targets(),
                      .row_losses = arrays_.row_losses,
                      .loss = arrays_.loss,
                      .gradient = mode_ == Mode::kTraining,
                      .gradient_scale = loss_scale_,
                      .rows = rows(),
                      .vocabulary = config_.vocabulary,
                      .stride = logits_stride()},
                     stream_);
}

void DeviceGpt::add_loss(double& sum, StreamId stream) {
  SLUICE_CHECK(forward_uses_done_ == use_count(), "the loss is known after the last forward use");
  std::byte* const landing = host_.data() + host_.size_bytes() - sizeof(double);
  device_.copy(landing, reinterpret_cast<const std::byte*>(arrays_.loss), sizeof(double), stream);
  device_.call_host(stream, [&sum, landing] { sum += *reinterpret_cast<const double*>(landing); });
}

}  // namespace sluice::gpt
