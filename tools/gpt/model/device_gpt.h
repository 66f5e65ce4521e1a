// This class computes GPT-2 with DeviceOps, one unit at a time. GptCompute does the same on the
// CPU. forward() computes one use of a unit, in the forward order of gpt_model_spec(). backward()
// computes one use of a unit, in the backward order. Activations have the type of the parameters,
// and sums are fp32. All work is enqueued on the stream that the caller names. A whole pass must
// use the same stream. The addresses of a unit's tensors may differ from use to use. Attention is
// computed with [sequence, sequence] products. All heads that fit into the limited scratch memory
// are computed together, of one sequence or of several. The backward pass computes the scores
// again.
//
// With checkpoints at the units' boundaries, the caller owns the values that cross the boundaries,
// and all blocks share the memory of one block. The backward pass then computes each block again.
// Checkpoints do not change the bits of the results: every product has the same description.
//
// Thread rule: one thread at a time.
// Invariant: if tensors start at multiples of 256 bytes, results depend on the arguments alone, and
// not on addresses.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/device.h>
#include <sluice/model_spec.h>
#include <sluice/units.h>
#include "tools/gpt/model/device_activations.h"
#include "tools/gpt/model/device_inputs.h"
#include "tools/gpt/model/device_losses.h"
#include "tools/gpt/model/device_ops.h"
#include "tools/gpt/model/gpt_config.h"
#include "tools/gpt/model/unit_tensors.h"

namespace sluice::gpt {

// The size of the scratch memory for attention. The memory holds scores, probabilities, and the
// gradients of both, for all heads that are computed together. The memory always has room for at
// least one head. With less memory, there are more kernel launches, and each launch computes fewer
// heads. A library may then choose other algorithms for the products of the heads, so two objects
// give the same bits only if their scratch memory has the same size.
inline constexpr std::uint64_t kAttentionScratchBytes = std::uint64_t{256} << 20;

// The heads whose attention is computed together: some heads of one sequence, or all heads of
// several sequences.
struct HeadGroup {
  std::uint64_t sequences = 1;
  std::uint64_t heads = 1;

  std::uint64_t count() const { return sequences * heads; }
};

struct DeviceGptOptions {
  Checkpoints checkpoints = Checkpoints::kNone;
  std::uint32_t micro_batches = 1;  // micro-batches at the same time; must be 1 without checkpoints
  std::uint64_t attention_scratch_bytes = kAttentionScratchBytes;
};

// In training with checkpoints, the struct points to the values that a use reads and writes. Each
// pointer points to [rows, width] values of the parameters' type. Without checkpoints,
// `micro_batch` must be 0, and the pointers are not used. In an evaluation, `micro_batch` is the
// number of the batch, and the pointers are not used.
struct DeviceBoundaries {
  std::uint32_t micro_batch = 0;
  const std::byte* input = nullptr;            // for all uses but the first forward use
  std::byte* output = nullptr;                 // forward: for all uses but the last
  const std::byte* output_gradient = nullptr;  // backward: for all uses but the last forward use
  std::byte* input_gradient = nullptr;         // backward: for all uses but the first forward use
};

class DeviceGpt {
 public:
  // `device` and `ops` must outlive the object. The constructor allocates all memory: activations
  // and scratch on the device, and a little page-locked memory on the host.
  // Fails with kConfig if the config is wrong, or if the sequence is beyond model.context. Fails
  // with kOutOfMemory if there is not enough memory.
  DeviceGpt(const GptConfig& config, BatchShape shape, Device& device, DeviceOps& ops,
            const DeviceGptOptions& options = {});
  DeviceGpt(const DeviceGpt&) = delete;
  DeviceGpt& operator=(const DeviceGpt&) = delete;

  std::uint64_t activation_bytes() const { return arrays_.memory.size_bytes(); }
  // Returns the same number as activation_bytes() for parameters of the given type. The function
  // makes no DeviceGpt.
  static std::uint64_t activation_bytes_of(const GptConfig& config, BatchShape shape, DType type,
                                           const DeviceGptOptions& options = {});
  // Returns the notes of DeviceOps::take_notes().
  std::vector<std::string> take_notes() { return ops_.take_notes(); }

  // Runs one training pass in which all parameters and tokens are zero, and waits until the pass
  // has ended. The pass runs every operation of training. The code and the plans of all operations
  // are therefore loaded when the call returns. During the call, the device also needs memory for
  // the parameters and gradients of the largest unit. Must be called between passes.
  // Fails with kOutOfMemory if there is not enough memory.
  void warm_up();

  std::uint32_t use_count() const { return static_cast<std::uint32_t>(spec_.forward_order.size()); }

  // Does the same as GptCompute::set_loss_scale().
  void set_loss_scale(float scale) { loss_scale_ = scale; }

  // Begins a pass over one micro-batch. The call copies batch * sequence tokens and as many
  // targets.
  // Requires: `tokens` and `targets` each have batch * sequence elements.
  // Fails with kInput if a token is beyond the vocabulary.
  void start_training(std::span<const std::uint32_t> tokens, std::span<const std::uint32_t> targets,
                      StreamId stream, std::uint32_t micro_batch = 0);
  // Does the same as GptCompute::start_evaluation(). Several batches may be under way at the same
  // time. Tokens and targets must live until the batch's last use is enqueued.
  void start_evaluation(std::span<const std::uint32_t> tokens,
                        std::span<const std::uint32_t> targets, std::uint32_t batch = 0);
  std::uint32_t evaluation_batches() const {
    return static_cast<std::uint32_t>(arrays_.of_evaluation.size());
  }

  // forward() and backward() do the same as in GptCompute, but enqueue the work on `stream`.
  // Gradients are overwritten.
  // Requires: the uses of a batch come in order, beginning with use 0.
  void forward(std::uint32_t use, ParameterPointers parameters, StreamId stream,
               const DeviceBoundaries& boundaries = {});
  void backward(std::uint32_t use, ParameterPointers parameters, GradientPointers gradients,
                StreamId stream, const DeviceBoundaries& boundaries = {});

  // Enqueues work that copies the pass's loss from the device to the host. Must be called right
  // after a batch's last forward use.
  void keep_loss(StreamId stream);
  // Returns the losses of all keep_loss() calls, in the order of the calls. The result contains no
  // loss that was already taken or dropped. Waits for `stream`, which must be the stream of
  // keep_loss().
  std::vector<double> take_losses(StreamId stream) { return losses_.take(stream); }
  // Discards the losses that keep_loss() has kept, for example after a failed pass.
  void drop_losses() { losses_.drop(); }

 private:
  enum class Mode : std::uint8_t { kTraining, kEvaluation };
  enum class Use : std::uint8_t { kEmbedding, kBlock, kHead, kTiedLogits };
  struct Batch {
    std::span<const std::uint32_t> tokens;
    std::span<const std::uint32_t> targets;
    // The rows that the loss counts. All other work has the rows of a whole micro-batch: fewer
    // would need other plans of the matrix products, which warm_up() has not loaded.
    std::uint64_t rows = 0;
    std::uint32_t forward_uses_done = 0;
    std::uint32_t backward_uses_done = 0;
  };
  Use kind_of(std::uint32_t forward_use) const;
  std::uint64_t rows() const { return shape_.rows(); }
  std::uint64_t type_bytes() const { return size_of(ops_.type()); }

  void linear(const std::byte* x, std::uint64_t x_width, std::uint32_t weight, std::byte* y,
              std::uint64_t y_width, const std::byte* residual);
  void linear_backward(const std::byte* x, std::uint64_t x_width, const std::byte* dy,
                       std::uint64_t y_width, std::uint32_t weight, std::byte* dx);
  void norm(const std::byte* x, std::uint32_t weight, std::byte* y, RowMoments* moments);
  void norm_backward(const std::byte* x, const RowMoments* moments, std::uint32_t weight,
                     const std::byte* dy, Into into);
  Batch& start(Mode mode, std::span<const std::uint32_t> tokens,
               std::span<const std::uint32_t> targets, std::uint32_t batch);
  void bring_inputs();
  std::uint32_t place_of_inputs() const { return mode_ == Mode::kTraining ? batch_ : 0; }
  bool has_checkpoints() const { return options_.checkpoints == Checkpoints::kUnits; }
  const DeviceBlock& block(std::uint32_t layer) const {
    return arrays_.block(mode_ == Mode::kEvaluation ? 0 : layer);
  }
  // Sets the addresses of the values that the use reads and writes.
  void select_forward(std::uint32_t use, const DeviceBoundaries& boundaries);
  void select_backward(std::uint32_t forward_use, const DeviceBoundaries& boundaries);
  const std::byte* normed() const { return config_.tied_head ? input_ : output_; }
  void final_norm_forward();
  void block_forward(std::uint32_t layer);
  void recompute_block(std::uint32_t layer);
  void block_backward(std::uint32_t layer);
  void attention_forward(const DeviceBlock& block);
  void attention_backward(const DeviceBlock& block);
  SoftmaxArguments softmax_of(const DeviceBlock& block, std::uint64_t first_row,
                              std::uint64_t first_head, HeadGroup group) const;
  void logits_forward(const std::byte* table);
  void logits_backward(const std::byte* table, std::byte* table_gradient);
  void embedding_backward_use();

  // Constant after construction.
  const GptConfig config_;
  const BatchShape shape_;
  const DeviceGptOptions options_;
  const ModelSpec spec_;
  Device& device_;
  DeviceOps& ops_;
  const HeadGroup head_group_;
  DeviceActivations arrays_;
  DeviceInputs inputs_;
  DeviceLosses losses_;

  // The state of the current call, and of the passes under way. All passes under way have the same
  // mode.
  Mode mode_ = Mode::kEvaluation;
  float loss_scale_ = 1;
  std::vector<Batch> batches_;  // one per batch of an evaluation, or per micro-batch of training
  std::uint32_t batch_ = 0;
  // The numbers of two micro-batches. `arrays_` contains the final norm of micro-batch
  // `final_norm_of_`, and the gradient of the logits of micro-batch `logits_of_`.
  std::optional<std::uint32_t> final_norm_of_;
  std::optional<std::uint32_t> logits_of_;
  const std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;  // null in a backward use that computes a block again
  const std::byte* output_gradient_ = nullptr;
  std::byte* input_gradient_ = nullptr;
  ParameterPointers parameters_;
  GradientPointers gradients_;
  StreamId stream_{};
};

}  // namespace sluice::gpt
