// The interface that trains the GPT through the engine's public API. HostTrainer implements this
// interface on the host (host_trainer.h), and GpuTrainer implements it on a GPU (gpu_trainer.h).
// Thread rule:
// one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

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

// How an evaluation learns that its result is no longer wanted, such as after Ctrl-C.
struct StopRequest {
  // Whether this rank has been asked to stop. Once true, the answer stays true. Called from any
  // thread.
  std::function<bool()> is_asked = [] { return false; };
  // Whether any rank has been asked. With several ranks, all ranks call this function at the same
  // points, on the trainer's thread, and get the same answer.
  std::function<bool()> is_agreed = [] { return false; };
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

  // The mean cross-entropy of `batches` in nats per token. The batches go through the model in
  // groups. A group has as many batches as fit the memory of the activations, and each unit is used
  // once for the whole group. The result does not depend on the size of the groups.
  double evaluate(std::span<const TokenBatch> batches) { return *evaluate_until({}, batches); }
  // Does the same as evaluate(), but returns nothing if `stop` ends the evaluation. The evaluation
  // then ends within about the time of one unit's use.
  virtual std::optional<double> evaluate_until(const StopRequest& stop,
                                               std::span<const TokenBatch> batches) = 0;

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
  // An evaluation: one inference of `engine` on `stream` of `device`, which uses the units in this
  // order for at most `batches_at_once` batches together.
  struct Evaluation {
    Engine& engine;
    Device& device;
    const Stream& stream;
    const std::vector<UnitId>& forward_order;
    std::uint32_t batches_at_once;
    // Adds the losses that ForwardGroup has not added, once all work on `stream` has been enqueued.
    // May be empty.
    std::function<void(double& loss)> settle = {};
  };
  // The function enqueues use `use` of the forward order for every batch of `group`. Behind the
  // last use, the function enqueues the addition of each batch's loss to `loss`, in the order of
  // the batches. The addition may be left to Evaluation::settle. The function may leave the rest
  // out once StopRequest::is_asked() is true.
  using ForwardGroup = std::function<void(const Lease& lease, std::uint32_t use,
                                          std::span<const TokenBatch> group, double& loss)>;
  static std::optional<double> mean_loss(const Evaluation& evaluation, const StopRequest& stop,
                                         std::span<const TokenBatch> batches,
                                         const ForwardGroup& forward);

  FinishOptions finish_options_;
};

}  // namespace sluice
