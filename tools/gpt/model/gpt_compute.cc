#include "tools/gpt/model/gpt_compute.h"

#include <algorithm>

#include <sluice/error.h>
#include "tools/gpt/model/attention.h"
#include "tools/gpt/model/gpt_model.h"
#include "tools/gpt/model/layers.h"

namespace sluice::gpt {
namespace {

ActivationNeeds needs_of(BatchShape shape, const GptComputeOptions& options) {
  return {.shape = shape,
          .threads = options.threads,
          .checkpoints = options.checkpoints,
          .bf16_factors = options.matmul.bf16_factors};
}

}  // namespace

GptCompute::GptCompute(const GptConfig& config, BatchShape shape, GptComputeOptions options)
    : config_(checked(config, shape)),
      shape_(shape),
      spec_(gpt_model_spec(config)),
      threads_(options.threads),
      products_(threads_, options.matmul),
      tensors_(spec_, options.precision, threads_, options.matmul.bf16_factors),
      activations_(config, needs_of(shape, options)),
      checkpoints_(options.checkpoints),
      micro_batches_(options.micro_batches),
      batches_(std::max(micro_batches_, evaluation_batches())) {
  SLUICE_CHECK(options.micro_batches == 1 || checkpoints_ == Checkpoints::kUnits,
               "without checkpoints there is one micro-batch at a time");
  for (Batch& batch : std::span(batches_).first(micro_batches_)) {
    batch.copied_tokens.reserve(shape.rows());
    batch.copied_targets.reserve(shape.rows());
  }
}

std::vector<std::uint64_t> boundary_bytes(const GptConfig& config, BatchShape shape, DType type) {
  const std::size_t uses = gpt_model_spec(config).forward_order.size();
  return std::vector<std::uint64_t>(uses - 1, shape.rows() * config.embedding * size_of(type));
}

std::uint64_t GptCompute::activation_bytes() const {
  return activations_.buffer.size_bytes() + tensors_.scratch_bytes() + products_.scratch_bytes();
}

std::uint64_t GptCompute::activation_bytes_of(const GptConfig& config, BatchShape shape,
                                              const GptComputeOptions& options) {
  return Activations::size_bytes(checked(config, shape), needs_of(shape, options)) +
         UnitTensors::scratch_bytes_of(gpt_model_spec(config), options.precision,
                                       options.matmul.bf16_factors) +
         MatrixProducts::scratch_bytes_of(options.threads, options.matmul);
}

void GptCompute::start_training(std::span<const std::uint32_t> tokens,
                                std::span<const std::uint32_t> targets, std::uint32_t micro_batch) {
  copy_inputs(start(Mode::kTraining, tokens, targets, micro_batch));
}

void GptCompute::start_evaluation(std::span<const std::uint32_t> tokens,
                                  std::span<const std::uint32_t> targets, std::uint32_t batch) {
  start(Mode::kEvaluation, tokens, targets, batch);
}

void GptCompute::start_generation(std::span<const std::uint32_t> prompt) {
  copy_inputs(start(Mode::kGeneration, prompt, {}));
}

void GptCompute::copy_inputs(Batch& batch) {
  batch.copied_tokens.assign(batch.tokens.begin(), batch.tokens.end());
  batch.copied_targets.assign(batch.targets.begin(), batch.targets.end());
  batch.tokens = batch.copied_tokens;
  batch.targets = batch.copied_targets;
}

GptCompute::Batch& GptCompute::start(Mode mode, std::span<const std::uint32_t> tokens,
                                     std::span<const std::uint32_t> targets,
                                     std::uint32_t micro_batch) {
  SLUICE_CHECK(micro_batch < batches_at_once(mode), "one of the batches under way");
  if (mode == Mode::kGeneration) {
    SLUICE_CHECK(!tokens.empty() && tokens.size() <= shape_.sequence,
                 "a prompt has between 1 and `sequence` tokens");
  } else {
    const bool is_evaluation = mode == Mode::kEvaluation;
    SLUICE_CHECK(
        is_evaluation ? shape_.takes(tokens.size()) : tokens.size() == shape_.rows(),
        "a micro-batch has batch * sequence tokens, in an evaluation maybe fewer sequences");
    SLUICE_CHECK(targets.size() == tokens.size(), "a target for each token");
  }
  check_tokens(config_, tokens);
  check_tokens(config_, targets);
  mode_ = mode;
  sequence_ = mode == Mode::kGeneration ? tokens.size() : shape_.sequence;
  Batch& batch = batches_[micro_batch];
  batch.tokens = tokens;
  batch.targets = targets;
  batch.forward_uses_done = 0;
  batch.backward_uses_done = 0;
  return batch;
}

GptCompute::Use GptCompute::kind_of(std::uint32_t forward_use) const {
  if (forward_use == 0) return Use::kEmbedding;
  if (forward_use <= config_.layers) return Use::kBlock;
  return forward_use == config_.layers + 1 ? Use::kHead : Use::kTiedLogits;
}

// Finds the use's activations. Without checkpoints a gradient changes in place on its way down. In
// an evaluation, the value between two uses changes in place on its way up: no use reads an element
// of its input once it has written that element of its output.
void GptCompute::select(std::uint32_t forward_use, const Boundaries& boundaries) {
  SLUICE_CHECK(boundaries.micro_batch < batches_at_once(mode_), "one of the batches under way");
  micro_batch_ = boundaries.micro_batch;
  batch_ = &batches_[micro_batch_];
  if (mode_ == Mode::kEvaluation) {
    input_ = output_ = activations_.of_evaluation[micro_batch_];
    return;
  }
  if (checkpoints_ == Checkpoints::kUnits) {
    input_ = boundaries.input;
    output_ = boundaries.output;
    d_output_ = boundaries.output_gradient;
    d_input_ = boundaries.input_gradient;
    return;
  }
  const auto boundary = [&](std::uint32_t use) {  // behind `use`
    if (use < config_.layers) return activations_.block(use).input;
    return use == config_.layers ? activations_.final_input : activations_.final_norm;
  };
  const auto gradient = [&](std::uint32_t use) {
    return use <= config_.layers ? activations_.d_residual : activations_.d_narrow;
  };
  input_ = forward_use == 0 ? nullptr : boundary(forward_use - 1);
  output_ = boundary(forward_use);
  d_output_ = gradient(forward_use);
  d_input_ = forward_use == 0 ? nullptr : gradient(forward_use - 1);
}

void GptCompute::forward(std::uint32_t use, ParameterPointers parameters,
                         const Boundaries& boundaries) {
  select(use, boundaries);
  SLUICE_CHECK(mode_ != Mode::kIdle && use == batch_->forward_uses_done && use < use_count(),
               "forward uses come in order, after a start");
  ++batch_->forward_uses_done;
  const Use kind = kind_of(use);
  if (kind == Use::kEmbedding) {
    embedding_forward_use(parameters);
    return;
  }
  tensors_.load(index_of(spec_.forward_order[use]), parameters);
  switch (kind) {
    case Use::kBlock: block_forward(use - 1); break;
    case Use::kHead:
      final_norm_forward();
      if (!config_.tied_head) logits_forward(tensors_.factor(kLmHeadWeight));
      break;
    default: logits_forward(tensors_.factor(kWte)); break;
  }
}

DType GptCompute::factor_type() const {
  return products_.choice().bf16_factors ? DType::kBf16 : DType::kFp32;
}

ConstMatrix GptCompute::factor(const float* values, std::uint64_t rows, std::uint64_t columns,
                               std::uint16_t* rounded) {
  if (factor_type() == DType::kFp32) return {values, rows, columns, columns};
  round_to(threads_, DType::kBf16, values, rounded, rows * columns);
  return {rounded, rows, columns, columns, DType::kBf16};
}

ConstMatrix GptCompute::weight_factor(const void* weight, std::uint64_t rows,
                                      std::uint64_t columns) const {
  return {weight, rows, columns, columns, factor_type()};
}

// Gathers rows straight from the unit: a copy of the whole table in fp32 would cost more.
void GptCompute::embedding_forward_use(ParameterPointers parameters) {
  SLUICE_CHECK(parameters.size() == kEmbeddingTensors, "one pointer per tensor of the unit");
  embedding_forward(threads_,
                    {.dtype = tensors_.precision().parameters,
                     .token = parameters[kWte],
                     .position = parameters[kWpe]},
                    batch_->tokens, sequence_, config_.embedding, output_);
}

// To the output, or where that is not wanted (a recomputation), as far as backward does.
void GptCompute::block_forward(std::uint32_t layer) {
  // The memory of the others has the values of an evaluation's batches.
  const BlockActivations& a = activations_.block(mode_ == Mode::kEvaluation ? 0 : layer);
  const std::uint64_t count = rows();
  const std::uint64_t width = config_.embedding;
  const auto linear = [&](const float* x, std::uint64_t x_width, std::uint32_t weight, float* y,
                          std::uint64_t y_width, const float* residual) {
    products_.multiply(Form::kAB, factor(x, count, x_width, activations_.input_factor),
                       weight_factor(tensors_.factor(weight), x_width, y_width),
                       {y, count, y_width, y_width},
                       {.bias = tensors_.parameter(weight + 1), .matrix = residual});
  };
  const auto norm = [&](const float* x, std::uint32_t weight, float* y, RowMoments* moments) {
    layer_norm_forward(threads_, {.rows = count, .columns = width}, x,
                       {tensors_.parameter(weight), tensors_.parameter(weight + 1)}, y, moments);
  };

  norm(input_, kLn1Weight, a.norm1, a.norm1_moments);
  linear(a.norm1, width, kAttentionWeight, a.qkv, 3 * width, nullptr);
  attention_forward(products_, {count / sequence_, sequence_, config_.heads, config_.head_width()},
                    a.qkv, a.attention, a.log_sums, activations_.attention_scratch);
  linear(a.attention, width, kAttentionProjectionWeight, a.middle, width, input_);
  norm(a.middle, kLn2Weight, a.norm2, a.norm2_moments);
  linear(a.norm2, width, kMlpWeight, a.mlp, 4 * width, nullptr);
  gelu_forward(threads_, a.mlp, a.gelu, count * 4 * width);
  if (output_ != nullptr) linear(a.gelu, 4 * width, kMlpProjectionWeight, output_, width, a.middle);
}

void GptCompute::final_norm_forward() {
  float* output = config_.tied_head && output_ != nullptr ? output_ : activations_.final_norm;
  layer_norm_forward(threads_, {.rows = rows(), .columns = config_.embedding}, input_,
                     {tensors_.parameter(kFinalNormWeight), tensors_.parameter(kFinalNormBias)},
                     output, activations_.final_moments);
  final_norm_of_ = micro_batch_;
}

void GptCompute::logits_forward(const void* table) {
  const std::uint64_t width = config_.embedding;
  const std::uint64_t vocabulary = config_.vocabulary;
  // Generation wants the last row alone.
  const bool last_only = mode_ == Mode::kGeneration;
  const std::uint64_t count = last_only ? 1 : rows();
  const float* normed = config_.tied_head ? input_ : activations_.final_norm;
  const float* x = normed + (rows() - count) * width;
  products_.multiply(Form::kABt, factor(x, count, width, activations_.input_factor),
                     weight_factor(table, vocabulary, width),
                     {activations_.logits, count, vocabulary, vocabulary});
  if (last_only) return;
  loss_ =
      cross_entropy(threads_, {.rows = count, .columns = vocabulary}, activations_.logits,
                    batch_->targets, activations_.row_losses,
                    mode_ == Mode::kTraining ? CrossEntropy::kGradient : CrossEntropy::kLossOnly,
                    loss_scale_, factor_type());
  logits_of_ = micro_batch_;
}

double GptCompute::loss() const {
  SLUICE_CHECK(
      mode_ != Mode::kGeneration && batch_ != nullptr && batch_->forward_uses_done == use_count(),
      "the loss is known after the last forward use");
  return loss_;
}

std::span<const float> GptCompute::last_logits() const {
  SLUICE_CHECK(
      mode_ == Mode::kGeneration && batch_ != nullptr && batch_->forward_uses_done == use_count(),
      "the logits are known after the last forward use of a generation");
  return {activations_.logits, config_.vocabulary};
}

}  // namespace sluice::gpt
