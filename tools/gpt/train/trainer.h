// A class with this interface trains the GPT through the engine's public API. HostTrainer
// (host_trainer.h) implements this interface on the host. GpuTrainer (gpu_trainer.h) implements
// this interface on a GPU.
// Thread rule: one thread at a time.
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
  std::int64_t drained_ns = 0;  // the part of report.times after finish() (drain_step())
};

// These functions tell an evaluation that its result is no longer wanted, for example after Ctrl-C.
struct StopRequest {
  // Whether this rank has been asked to stop. If the function has returned true once, all later
  // calls return true, too. Any thread may call this function.
  std::function<bool()> is_asked = [] { return false; };
  // Whether any rank has been asked to stop. If there are several ranks, all ranks call this
  // function at the same points, on the trainer's thread. All ranks then get the same answer.
  std::function<bool()> is_agreed = [] { return false; };
};

class Trainer {
 public:
  Trainer() = default;
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;
  virtual ~Trainer() = default;

  // Trains the step with the number `step`. Steps are counted from 0. The step goes forward and
  // backward over its micro-batches, and then updates the parameters.
  virtual TrainedStep train_step(std::uint64_t step) = 0;

  // Sets the options that the next steps pass to finish(). For example, the options contain the
  // text that a durable store keeps for the run.
  void set_finish_options(FinishOptions options) { finish_options_ = std::move(options); }

  // Returns the mean cross-entropy of `batches` in nats per token. Every token has the same weight.
  // Some batches may have fewer sequences than batch.sequences. The batches go through the model in
  // groups. A group has as many batches as fit into the memory of the activations. Each use of a
  // unit computes all batches of the group. The result does not depend on the size of the groups.
  double evaluate(std::span<const TokenBatch> batches) { return *evaluate_until({}, batches); }
  // Does the same as evaluate(), but returns nothing if `stop` ends the evaluation. After a request
  // to stop, the evaluation ends within about the time that one use of a unit takes.
  virtual std::optional<double> evaluate_until(const StopRequest& stop,
                                               std::span<const TokenBatch> batches) = 0;

  // Whether next_logits() works.
  virtual bool can_sample() const { return false; }
  // The logits of the token that follows `tokens`. The logits are valid until the next call of any
  // function.
  // Requires: can_sample() returns true, no step is active, and there are 1 to model.context
  // tokens.
  virtual std::span<const float> next_logits(std::span<const std::uint32_t> /*tokens*/) {
    throw Error(ErrorCode::kUnsupported, "this trainer draws no samples");
  }

  virtual std::uint64_t activation_bytes() const = 0;

  // Returns the number of multiply-adds in all matrix products so far, for each library. On a GPU,
  // all numbers are 0.
  virtual gpt::MatrixWork matrix_work() const { return {}; }

 protected:
  // An evaluation is one inference of `engine` on `stream` of `device`. The inference uses the
  // units in `forward_order`. Each use of a unit computes at most `batches_at_once` batches
  // together.
  struct Evaluation {
    Engine& engine;
    Device& device;
    const Stream& stream;
    const std::vector<UnitId>& forward_order;
    std::uint32_t batches_at_once;
    // This function appends to `losses` all losses that ForwardGroup has not appended yet. The
    // function is called when all work on `stream` has ended. The function may be empty.
    std::function<void(std::vector<double>& losses)> settle = {};
  };
  // A function that enqueues one use of a unit for every batch of `group`. `use` is the index of
  // the use in the forward order. After the last use, the function also enqueues work that appends
  // each batch's loss to `losses`, in the order of the batches. The function need not append the
  // losses if Evaluation::settle does. If StopRequest::is_asked() returns true, the function may
  // skip work.
  using ForwardGroup =
      std::function<void(const Lease& lease, std::uint32_t use, std::span<const TokenBatch> group,
                         std::vector<double>& losses)>;
  static std::optional<double> mean_loss(const Evaluation& evaluation, const StopRequest& stop,
                                         std::span<const TokenBatch> batches,
                                         const ForwardGroup& forward);

  FinishOptions finish_options_;
};

}  // namespace sluice
