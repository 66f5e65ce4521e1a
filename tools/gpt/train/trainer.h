// The interface that trains the GPT through the engine's public API. HostTrainer implements this
// interface on the host (host_trainer.h), and GpuTrainer implements it on a GPU (gpu_trainer.h).
// Thread rule:
// one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>

#include <sluice/device.h>
#include <sluice/engine.h>
#include <sluice/error.h>
#include <sluice/step.h>
#include "tools/gpt/model/matmul.h"
#include "tools/gpt/train/dataset.h"

namespace sluice {

struct TrainedStep {
  double loss = 0;  // mean over the micro-batches, before the update
  StepReport report;
};

class Trainer {
 public:
  Trainer() = default;
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;
  virtual ~Trainer() = default;

  // Trains step number `step`, counted from 0. The step goes forward and backward over its
  // micro-batches, and then updates.
  virtual TrainedStep train_step(std::uint64_t step) = 0;

  // Sets the options for finish() of the next steps, such as the text that a durable store keeps
  // for the run.
  void set_finish_options(FinishOptions options) { finish_options_ = std::move(options); }

  // The mean cross-entropy of `batches` in nats per token.
  virtual double evaluate(std::span<const TokenBatch> batches) = 0;

  // Whether next_logits() works.
  virtual bool can_sample() const { return false; }
  // The logits of the token that follows `tokens`. The logits are valid until the next call of any
  // function. Requires: can_sample(), between 1 and model.context tokens, and no active step.
  virtual std::span<const float> next_logits(std::span<const std::uint32_t> /*tokens*/) {
    throw Error(ErrorCode::kUnsupported, "this trainer draws no samples");
  }

  virtual std::uint64_t activation_bytes() const = 0;

  // The multiply-adds of the matrix products so far, by library. The numbers are zero on a GPU.
  virtual gpt::MatrixWork matrix_work() const { return {}; }

 protected:
  // The call evaluates with one inference of `engine` on `stream` of `device`. `forward` enqueues
  // the forward pass of a batch on the stream. `forward` then enqueues the addition of the batch's
  // loss to `loss`.
  using ForwardBatch =
      std::function<void(Inference& inference, const TokenBatch& batch, double& loss)>;
  static double mean_loss(Engine& engine, Device& device, const Stream& stream,
                          std::span<const TokenBatch> batches, const ForwardBatch& forward);

  FinishOptions finish_options_;
};

}  // namespace sluice
