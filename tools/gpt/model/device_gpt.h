// This class computes GPT-2 with DeviceOps, one unit at a time, as GptCompute does on the CPU. The
// class first computes use i of the forward order, and then use i of the backward order
// (gpt_model_spec). Activations have the type of the parameters, and sums are fp32. All work is
// enqueued on the stream that the caller names. A whole pass must use the same stream. The
// addresses of a unit's tensors may differ at every use. Attention is computed with [sequence,
// sequence] products. The scratch memory is limited. All heads that fit into it are computed
// together. The backward pass computes the scores again.
//
// Thread rule: one thread at a time.
// Invariant: results depend on the arguments alone, not on addresses, as long as tensors start at
// multiples of 256 bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <sluice/device.h>
#include <sluice/model_spec.h>
#include <sluice/units.h>
#include "tools/gpt/model/activations.h"
#include "tools/gpt/model/device_inputs.h"
#include "tools/gpt/model/device_losses.h"
#include "tools/gpt/model/device_ops.h"
#include "tools/gpt/model/gpt_config.h"
#include "tools/gpt/model/unit_tensors.h"

namespace sluice::gpt {

// The scratch memory for the scores, the probabilities and their gradients, of all heads that are
// computed together. There is room for one head at least. With less memory, there are more and
// smaller launches.
inline constexpr std::uint64_t kAttentionScratchBytes = std::uint64_t{256} << 20;

class DeviceGpt {
 public:
  // `device` and `ops` must outlive the object. The constructor allocates all memory: activations
  // and scratch on the device, and a little page-locked memory on the host.
  // Fails with kConfig if the config is wrong or the sequence is beyond model.context, and with
  // kOutOfMemory.
  DeviceGpt(const GptConfig& config, BatchShape shape, Device& device, DeviceOps& ops,
            std::uint64_t attention_scratch_bytes = kAttentionScratchBytes);
  DeviceGpt(const DeviceGpt&) = delete;
  DeviceGpt& operator=(const DeviceGpt&) = delete;

  std::uint64_t activation_bytes() const { return memory_.size_bytes(); }
  // Returns the activation_bytes() that a model with parameters of `type` would have. The model
  // need not exist.
  static std::uint64_t activation_bytes_of(
      const GptConfig& config, BatchShape shape, DType type,
      std::uint64_t attention_scratch_bytes = kAttentionScratchBytes);
  // DeviceOps::take_notes().
  std::vector<std::string> take_notes() { return ops_.take_notes(); }

  // Computes one pass of training over zeros and waits for the end. Every operation of the training
  // has then run, so its code and its plan are loaded. Meanwhile, the call takes memory for the
  // parameters and gradients of the largest unit. Must be called between passes.
  // Fails with kOutOfMemory if there is not enough memory.
  void warm_up();

  std::uint32_t use_count() const { return static_cast<std::uint32_t>(spec_.forward_order.size()); }

  // As GptCompute::set_loss_scale().
  void set_loss_scale(float scale) { loss_scale_ = scale; }

  // Begins a pass over one micro-batch, and copies its batch * sequence tokens and as many targets.
  // Requires: the sizes match.
  // Fails with kInput if a token is beyond the vocabulary.
  void start_training(std::span<const std::uint32_t> tokens, std::span<const std::uint32_t> targets,
                      StreamId stream);
  // As in GptCompute: several batches may be under way, and tokens and targets must live until the
  // batch's last use is enqueued.
  void start_evaluation(std::span<const std::uint32_t> tokens,
                        std::span<const std::uint32_t> targets, std::uint32_t batch = 0);
  std::uint32_t evaluation_batches() const {
    return static_cast<std::uint32_t>(of_evaluation_.size());
  }

  // Does the same as in GptCompute, but enqueues the work on `stream`. Gradients are overwritten.
  // `batch` is the number of the batch in an evaluation.
  // Requires: the uses of a batch come in order, beginning with use 0.
  void forward(std::uint32_t use, ParameterPointers parameters, StreamId stream,
               std::uint32_t batch = 0);
  void backward(std::uint32_t use, ParameterPointers parameters, GradientPointers gradients,
                StreamId stream);

  // Enqueues the copy of the pass's loss to the host. To be called right after a batch's last
  // forward use.
  void keep_loss(StreamId stream);
  // Returns the losses that were kept since the last call of this function or of drop_losses(), in
  // their order. Waits for `stream`, which must be the stream of keep_loss().
  std::vector<double> take_losses(StreamId stream) { return losses_.take(stream); }
  // Forgets the losses of a pass that has been given up.
  void drop_losses() { losses_.drop(); }

 private:
  enum class Mode : std::uint8_t { kTraining, kEvaluation };
  enum class Use : std::uint8_t { kEmbedding, kBlock, kHead, kTiedLogits };
  struct Batch {
    std::span<const std::uint32_t> tokens;
    std::span<const std::uint32_t> targets;
    std::uint32_t forward_uses_done = 0;
  };
  // The values that a block's forward pass leaves. W = width, R = rows; the type is T unless stated
  // otherwise.
  struct Block {
    std::byte* input;  // [R, W]
    RowMoments* norm1_moments;
    std::byte* norm1;      // [R, W]
    std::byte* qkv;        // [R, 3 W]
    float* log_sums;       // [batch, heads, sequence]
    std::byte* attention;  // [R, W]
    std::byte* middle;     // [R, W]
    RowMoments* norm2_moments;
    std::byte* norm2;  // [R, W]
    std::byte* mlp;    // [R, 4 W]
    std::byte* gelu;   // [R, 4 W]
  };
  struct Arrays {
    std::vector<Block> blocks;
    std::byte* final_input;
    RowMoments* final_moments;
    std::byte* final_norm;
    std::byte* logits;  // [R, vocabulary], logits_stride() apart, then their gradient
    float* row_losses;
    double* loss;
    std::byte* d_residual;  // [R, W]
    std::byte* d_narrow;    // [R, W]
    std::byte* d_wide;      // [R, 4 W]
    float* partials;
    // For head_group_ heads: [sequence, sequence] each.
    float* scores;
    float* d_probabilities;
    std::byte* probabilities;
    std::byte* d_scores;
    std::uint32_t* inputs;  // DeviceInputs
  };
  struct Sizes {
    const GptConfig& config;
    BatchShape shape;
    DType type;
    std::uint64_t head_group;
  };
  Sizes sizes() const { return {config_, shape_, ops_.type(), head_group_}; }
  // Divides the memory at `base` among the arrays. Returns the size that they take. With a null
  // `base`, only computes the size.
  static std::uint64_t carve(const Sizes& sizes, std::byte* base, Arrays& arrays);
  Use kind_of(std::uint32_t forward_use) const;
  std::uint64_t rows() const { return shape_.rows(); }
  // The stride is a multiple of 128 elements. Matrix products are many times slower, or impossible,
  // if rows begin at odd addresses. The embedding table itself has only the vocabulary's rows.
  static std::uint64_t logits_stride(const GptConfig& config) {
    return align_up(config.vocabulary, 128);
  }
  std::uint64_t logits_stride() const { return logits_stride(config_); }
  std::uint64_t type_bytes() const { return size_of(ops_.type()); }

  void linear(const std::byte* x, std::uint64_t x_width, std::uint32_t weight, std::byte* y,
              std::uint64_t y_width, const std::byte* residual);
  void linear_backward(const std::byte* x, std::uint64_t x_width, const std::byte* dy,
                       std::uint64_t y_width, std::uint32_t weight, std::byte* dx);
  void norm(const std::byte* x, std::uint32_t weight, std::byte* y, RowMoments* moments);
  void norm_backward(const std::byte* x, const RowMoments* moments, std::uint32_t weight,
                     Into into);
  std::vector<std::byte*> places_of_evaluation() const;
  Batch& start(Mode mode, std::span<const std::uint32_t> tokens,
               std::span<const std::uint32_t> targets, std::uint32_t batch);
  void bring_inputs();
  std::byte* value_before(std::uint32_t layer) const;
  std::byte* normed() const;
  void block_forward(std::uint32_t layer);
  void block_backward(std::uint32_t layer);
  void attention_forward(const Block& block);
  void attention_backward(const Block& block);
  SoftmaxArguments softmax_of(const Block& block, std::uint64_t first_row, std::uint64_t first_head,
                              std::uint64_t heads) const;
  void logits_forward(const std::byte* table);
  void logits_backward(const std::byte* table, std::byte* table_gradient);
  void embedding_backward_use();

  // Constant after construction.
  const GptConfig config_;
  const BatchShape shape_;
  const ModelSpec spec_;
  Device& device_;
  DeviceOps& ops_;
  std::uint64_t head_group_;
  Arrays arrays_;
  DeviceBuffer memory_;
  DeviceInputs inputs_;
  DeviceLosses losses_;
  // [R, W] each, as Activations::of_evaluation.
  std::vector<std::byte*> of_evaluation_;

  // State of the passes under way, all of one mode, and of the current call.
  Mode mode_ = Mode::kEvaluation;
  float loss_scale_ = 1;
  std::vector<Batch> batches_;  // by batch of an evaluation; the first one in training
  std::uint32_t batch_ = 0;
  std::uint32_t backward_uses_done_ = 0;
  ParameterPointers parameters_;
  GradientPointers gradients_;
  StreamId stream_{};
};

}  // namespace sluice::gpt
