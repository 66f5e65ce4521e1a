// Computes GPT-2 on the CPU, one unit at a time, in the order in which the engine brings the units:
// use i of the forward order, then use i of the backward order (gpt_model_spec). The caller passes
// the addresses of the unit's tensors, which may differ at every use. All arithmetic is fp32;
// results do not depend on the number of threads, nor on the addresses as long as tensors start at
// multiples of 256 bytes.
// Thread rule: one call at a time; each returns when its work is done.
//
//   compute.start_training(tokens, targets);
//   for (use = 0; use < compute.use_count(); ++use) compute.forward(use, parameters);
//   compute.loss();
//   for (use = 0; use < compute.use_count(); ++use) compute.backward(use, parameters, gradients);
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/model_spec.h"
#include "tools/gpt/activations.h"
#include "tools/gpt/compute_threads.h"
#include "tools/gpt/gpt_config.h"
#include "tools/gpt/matmul.h"
#include "tools/gpt/unit_tensors.h"

namespace sluice::gpt {

struct GptComputeOptions {
  unsigned threads = 1;
  Precision precision = {};  // of parameters and gradients at rest
};

class GptCompute {
 public:
  // Fails with: kConfig (bad config, sequence beyond model.context, no threads), kUnsupported
  // (fp16), kOutOfMemory.
  GptCompute(const GptConfig& config, BatchShape shape, GptComputeOptions options);

  // Activations and scratch, all allocated at construction.
  std::uint64_t activation_bytes() const;

  // Uses of units per pass: the length of forward_order and of backward_order.
  std::uint32_t use_count() const { return static_cast<std::uint32_t>(spec_.forward_order.size()); }

  // Begins a pass over one micro-batch. Copies tokens and targets: batch * sequence each, sequence
  // by sequence; targets[t] is the token that follows tokens[t]. Training keeps what backward
  // needs; evaluation ends with loss().
  // Requires: the sizes match.
  // Fails with: kInput for a token beyond the vocabulary.
  void start_training(std::span<const std::uint32_t> tokens,
                      std::span<const std::uint32_t> targets);
  void start_evaluation(std::span<const std::uint32_t> tokens,
                        std::span<const std::uint32_t> targets);

  // Begins a pass that ends with last_logits().
  // Requires: 1 <= prompt.size() <= sequence.
  // Fails with: kInput as above.
  void start_generation(std::span<const std::uint32_t> prompt);

  // Computes use `use` of the forward order.
  // Requires: uses come in order, 0 first.
  void forward(std::uint32_t use, ParameterPointers parameters);

  // Computes use `use` of the backward order and overwrites every gradient of the unit with its
  // part of the gradient of loss(); parts of a unit that is used twice add up.
  // Requires: start_training, the whole forward pass, uses in order.
  void backward(std::uint32_t use, ParameterPointers parameters, GradientPointers gradients);

  // Mean cross entropy over the tokens, in nats, after the last forward use.
  double loss() const;

  // [vocabulary], for the token after the prompt, after the last forward use of a generation. Valid
  // until the next pass.
  std::span<const float> last_logits() const;

 private:
  enum class Mode : std::uint8_t { kIdle, kTraining, kEvaluation, kGeneration };
  enum class Use : std::uint8_t { kEmbedding, kBlock, kHead, kTiedLogits };

  void start(Mode mode, std::span<const std::uint32_t> tokens,
             std::span<const std::uint32_t> targets);
  Use kind_of(std::uint32_t forward_use) const;
  std::uint64_t rows() const { return tokens_.size(); }

  void embedding_forward_use(ParameterPointers parameters);
  void block_forward(std::uint32_t layer);
  void final_norm_forward();
  void logits_forward(const float* table);

  void logits_backward(const float* table, float* table_gradient);
  void final_norm_backward();
  void block_backward(std::uint32_t layer);
  void mlp_backward(std::uint32_t layer);
  void attention_part_backward(std::uint32_t layer);
  void embedding_backward_use();
  // Gradients of weight, bias and x of y = x W + b.
  void linear_backward(ConstMatrix x, const float* dy, std::uint32_t weight, std::uint32_t bias,
                       float* dx);

  // Constant after construction.
  GptConfig config_;
  BatchShape shape_;
  ModelSpec spec_;

  ComputeThreads threads_;
  UnitTensors tensors_;
  Activations activations_;

  // The pass that is under way.
  Mode mode_ = Mode::kIdle;
  std::uint64_t sequence_ = 0;
  std::vector<std::uint32_t> tokens_;
  std::vector<std::uint32_t> targets_;
  std::uint32_t forward_uses_done_ = 0;
  std::uint32_t backward_uses_done_ = 0;
  double loss_ = 0;
};

}  // namespace sluice::gpt
