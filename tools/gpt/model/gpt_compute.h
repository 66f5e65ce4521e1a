// This class computes GPT-2 on the CPU, one unit at a time, in the order in which the engine
// provides the units. forward() computes one use of a unit, in the forward order of
// gpt_model_spec(). backward() computes one use of a unit, in the backward order. The caller passes
// the addresses of the unit's tensors. The addresses may differ from use to use. All arithmetic is
// fp32, except matrix products with bf16 factors. A product with bf16 factors rounds activations
// and gradients to bf16, takes the parameters without a conversion, and sums in fp32. Results do
// not depend on the number of threads. If tensors start at multiples of 256 bytes, results do not
// depend on the addresses either.
// Thread rule: one call at a time. Each call returns when its work is done.
//
//   compute.start_training(tokens, targets);
//   for (use = 0; use < compute.use_count(); ++use) compute.forward(use, parameters);
//   compute.loss();
//   for (use = 0; use < compute.use_count(); ++use) compute.backward(use, parameters, gradients);
//
// If there are checkpoints at the units' boundaries, the caller keeps the values that cross the
// boundaries. The caller passes the addresses of these values to every use. backward() then
// computes the other activations of the unit again. Checkpoints do not change the bits, because the
// second computation performs the same operations on the same values. With checkpoints, several
// micro-batches may be under way at the same time. Several batches of an evaluation may always be
// under way at the same time. An evaluation keeps the values of its batches between two uses of
// units. These values lie in memory that training uses for other values.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <sluice/model_spec.h>
#include "tools/gpt/model/activations.h"
#include "tools/gpt/model/compute_threads.h"
#include "tools/gpt/model/gpt_config.h"
#include "tools/gpt/model/matmul.h"
#include "tools/gpt/model/unit_tensors.h"

namespace sluice::gpt {

struct GptComputeOptions {
  unsigned threads = 1;
  Precision precision = {};  // the element types of stored parameters and gradients
  Checkpoints checkpoints = Checkpoints::kNone;
  std::uint32_t micro_batches = 1;  // micro-batches at the same time; must be 1 without checkpoints
  MatmulChoice matmul = {};
};

// With checkpoints, a Boundaries points to the values that a use reads and writes. Each pointer
// points to [rows, width] floats, which begin at a multiple of 256 bytes. Without checkpoints,
// `micro_batch` must be 0, and the pointers are not used. In an evaluation, `micro_batch` is the
// number of the batch, and the pointers are not used.
struct Boundaries {
  std::uint32_t micro_batch = 0;
  const float* input = nullptr;            // for all uses but the first forward use
  float* output = nullptr;                 // forward: for all uses but the last
  const float* output_gradient = nullptr;  // backward: for all uses but the last forward use
  float* input_gradient = nullptr;         // backward: for all uses but the first forward use
};

// Returns one size in bytes for each boundary. Each size is the largest size that the value at the
// boundary can have. `shape` is the largest shape of a batch, and `type` is the type of the values'
// elements.
std::vector<std::uint64_t> boundary_bytes(const GptConfig& config, BatchShape shape,
                                          DType type = DType::kFp32);

class GptCompute {
 public:
  // Fails with:
  // - kConfig: the config is wrong, the sequence is beyond model.context, or there are no threads.
  // - kOutOfMemory: there is not enough memory.
  GptCompute(const GptConfig& config, BatchShape shape, GptComputeOptions options);

  // The size of activations and scratch memory, in bytes. The constructor allocates all of this
  // memory.
  std::uint64_t activation_bytes() const;
  // Returns the same number as activation_bytes() of a GptCompute with these arguments. The
  // function makes no GptCompute.
  static std::uint64_t activation_bytes_of(const GptConfig& config, BatchShape shape,
                                           const GptComputeOptions& options);

  // The number of multiply-adds in all matrix products so far, for each library.
  MatrixWork matrix_work() const { return products_.work(); }

  // The number of uses of units per pass, which is the length of forward_order and of
  // backward_order.
  std::uint32_t use_count() const { return static_cast<std::uint32_t>(spec_.forward_order.size()); }

  // From the next pass on, backward() computes the gradients of loss() * scale. The initial scale
  // is 1.
  void set_loss_scale(float scale) { loss_scale_ = scale; }

  // Begins a pass over one micro-batch. The call copies batch * sequence tokens and as many
  // targets, one sequence after another. targets[t] is the token that follows tokens[t]. The pass
  // keeps the values that backward() needs.
  // Requires: `tokens` and `targets` each have batch * sequence elements, and `micro_batch` is
  // below GptComputeOptions::micro_batches.
  // Fails with kInput if a token is beyond the vocabulary.
  void start_training(std::span<const std::uint32_t> tokens, std::span<const std::uint32_t> targets,
                      std::uint32_t micro_batch = 0);

  // Begins an evaluation pass. loss() returns the loss after the pass. Tokens and targets have the
  // form that start_training() takes, but there may be fewer sequences. The call does not copy
  // tokens and targets, so the caller must keep both in memory until the batch's last use. Several
  // batches may be under way at the same time, and the uses of different batches may come in any
  // order. A call of start_training() or start_generation() ends all batches of the evaluation.
  // Requires: `tokens` has the elements of 1 to `batch` sequences of the shape, and `targets` as
  // many. The number `batch` of this call is below evaluation_batches().
  // Fails with kInput if a token is beyond the vocabulary.
  void start_evaluation(std::span<const std::uint32_t> tokens,
                        std::span<const std::uint32_t> targets, std::uint32_t batch = 0);
  // The number of batches that can be evaluated at the same time; at least two.
  std::uint32_t evaluation_batches() const {
    return static_cast<std::uint32_t>(activations_.of_evaluation.size());
  }

  // Begins a generation pass. last_logits() returns the logits after the pass.
  // Requires: 1 <= prompt.size() <= sequence.
  // Fails with kInput if a token is beyond the vocabulary.
  void start_generation(std::span<const std::uint32_t> prompt);

  // Computes one use of a unit. `use` is the index of the use in the forward order.
  // Requires: the uses of a micro-batch come in order, beginning with use 0.
  void forward(std::uint32_t use, ParameterPointers parameters, const Boundaries& boundaries = {});

  // Computes one use of a unit. `use` is the index of the use in the backward order. The call
  // overwrites every gradient of the unit with the part that this use contributes to the gradient
  // of loss(). If a unit is used twice, the gradient of the unit is the sum of the parts of both
  // uses.
  // Requires: start_training() and the whole forward pass have run, and uses come in order.
  void backward(std::uint32_t use, ParameterPointers parameters, GradientPointers gradients,
                const Boundaries& boundaries = {});

  // The mean cross entropy over the tokens, in nats. Must be called right after a micro-batch's
  // last forward use.
  double loss() const;

  // The logits for the token after the prompt, one for each token of the vocabulary. Must be called
  // after the last forward use of a generation. The logits are valid until the next pass.
  std::span<const float> last_logits() const;

 private:
  enum class Mode : std::uint8_t { kIdle, kTraining, kEvaluation, kGeneration };
  enum class Use : std::uint8_t { kEmbedding, kBlock, kHead, kTiedLogits };
  struct Batch {
    std::span<const std::uint32_t> tokens;
    std::span<const std::uint32_t> targets;
    std::vector<std::uint32_t> copied_tokens;  // only in training and generation
    std::vector<std::uint32_t> copied_targets;
    std::uint32_t forward_uses_done = 0;
    std::uint32_t backward_uses_done = 0;
  };

  Batch& start(Mode mode, std::span<const std::uint32_t> tokens,
               std::span<const std::uint32_t> targets, std::uint32_t micro_batch = 0);
  void copy_inputs(Batch& batch);
  std::uint32_t batches_at_once(Mode mode) const {
    return mode == Mode::kEvaluation ? evaluation_batches() : micro_batches_;
  }
  void select(std::uint32_t forward_use, const Boundaries& boundaries);
  Use kind_of(std::uint32_t forward_use) const;
  std::uint64_t rows() const { return batch_->tokens.size(); }

  void embedding_forward_use(ParameterPointers parameters);
  void block_forward(std::uint32_t layer);
  void final_norm_forward();
  void logits_forward(const void* table);

  void recompute_final_norm();
  void recompute_logits(const void* table);
  void logits_backward(std::uint32_t table);
  void final_norm_backward();
  void block_backward(std::uint32_t layer);
  void recompute_block(std::uint32_t layer);
  void mlp_backward(std::uint32_t layer);
  void attention_part_backward(std::uint32_t layer);
  void embedding_backward_use();
  // Returns the matrix `values` in the type that matrix products need. For bf16 factors, the result
  // is a rounded copy in `rounded`. Otherwise, the result is `values` itself.
  ConstMatrix factor(const float* values, std::uint64_t rows, std::uint64_t columns,
                     std::uint16_t* rounded);
  ConstMatrix weight_factor(const void* weight, std::uint64_t rows, std::uint64_t columns) const;
  Matrix weight_gradient(std::uint32_t tensor, std::uint64_t rows, std::uint64_t columns);
  // The gradient of the logits. cross_entropy() has rounded this gradient in place if products take
  // bf16.
  ConstMatrix logits_gradient() const;
  DType factor_type() const;
  // For y = x W + b, computes the gradients of the weight W, the bias b and x.
  void linear_backward(const float* x, std::uint64_t x_width, const float* dy, std::uint32_t weight,
                       float* dx);

  // Constant after construction.
  GptConfig config_;
  BatchShape shape_;
  ModelSpec spec_;

  ComputeThreads threads_;
  MatrixProducts products_;
  UnitTensors tensors_;
  Activations activations_;
  const Checkpoints checkpoints_;
  const std::uint32_t micro_batches_;

  // The passes that are under way. All of these passes have the same mode.
  Mode mode_ = Mode::kIdle;
  float loss_scale_ = 1;
  std::uint64_t sequence_ = 0;
  std::vector<Batch> batches_;  // one per micro-batch, or per batch of an evaluation
  double loss_ = 0;
  // The field `final_norm_of_` says to which micro-batch the final norm in `activations_` belongs.
  // The field `logits_of_` says the same for the logits.
  std::uint32_t final_norm_of_ = 0;
  std::uint32_t logits_of_ = 0;

  // The pointers point to the activations of the current use. These activations lie in
  // `activations_` or in the caller's memory. With a tied head, the output of the final norm
  // crosses a boundary. Without a tied head, the output of the final norm lies in an array of
  // `activations_`.
  Batch* batch_ = nullptr;
  std::uint32_t micro_batch_ = 0;
  const float* input_ = nullptr;
  float* output_ = nullptr;
  const float* d_output_ = nullptr;
  float* d_input_ = nullptr;
};

}  // namespace sluice::gpt
