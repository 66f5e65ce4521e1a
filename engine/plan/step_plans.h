// The plans of a step contain everything that is known before the step runs. The plans describe the
// schedule, the places of units in the device window, and the movement of boundary activations. The
// sequence of activations stays the same even if the schedule changes. The plans of the last few
// numbers and orders of micro-batches are kept: no budget counts them, and they grow with a step.
//
// Thread rule: one thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/plan/traffic.h"

namespace sluice {

struct StepPlan {
  Schedule schedule;
  WindowPlan window;
};

// The units' sizes in the device window, the window's size, and the number of leases.
struct WindowShape {
  std::span<const std::uint64_t> unit_bytes;
  std::uint64_t window_bytes = 0;
  std::uint32_t leases = 1;
};

// The step has followed `plan` up to `progress`, and uses `unit` next. Returns its new plan. Where
// the units that come later have no place, the plan ends behind the next uses, or behind the next
// one. Those that come later are then unexpected, too.
// Fails with kOutOfMemory if `unit` has no place beside the leased units, without those of
// progress.unleased.
StepPlan changed_plan(const StepPlan& plan, const WindowProgress& progress, UnitId unit, Pass pass,
                      const WindowShape& window);

class StepPlans {
 public:
  // All arguments must outlive the plans. `model` is a result of validated(). The constructor
  // already plans an inference and a step of one micro-batch.
  // Fails with kOutOfMemory if the window cannot hold the leases.
  StepPlans(const ModelSpec& model, const Layout& layout, const Placement& placement);

  const StepPlan& inference() const { return inference_; }
  // Returns the plan of a step that begins. The prefetcher follows the plan of the step before
  // until then. So the reference, and that to the activations of the same step, stay valid until
  // steps of two other numbers or orders of micro-batches have begun.
  const StepPlan& training(std::uint32_t micro_batches, MicroBatchOrder order);

  // The plan is empty if the application keeps activations.
  const ActivationPlan& inference_activations() const { return inference_activations_; }
  // The reference stays valid until the plan of another step is asked for. If training() is called
  // for this step before that, the reference stays valid as long as the one of training().
  // Fails with kInvalidArgument if the step is too large for the activation pools.
  const ActivationPlan& activations(std::uint32_t micro_batches, MicroBatchOrder order);

  // Returns the new plan of a step. The step has followed `plan` up to `progress`, and now uses
  // `unit` instead of the planned unit. After the last planned use, an inference may use the first
  // unit again. If an inference uses the first unit again, the inference has another batch. In this
  // case, the new plan expects twice as many batches. So a few changes of the plan are enough for
  // any number of batches.
  // Fails with the error of changed_plan().
  StepPlan changed(const StepPlan& plan, const WindowProgress& progress, UnitId unit,
                   Pass pass) const;
  // expect_inference() makes the plans expect that later inferences follow `schedule`.
  // expect_training() makes the plans expect `schedule` for steps with the given number and order
  // of micro-batches. A call has no effect if the window cannot be planned for `schedule`.
  void expect_inference(Schedule schedule);
  void expect_training(std::uint32_t micro_batches, MicroBatchOrder order, Schedule schedule);
  Traffic predict_traffic(std::uint32_t micro_batches, MicroBatchOrder order) const;

  // The bytes that each unit needs in the device window. A unit whose home is the device needs 0
  // bytes.
  std::span<const std::uint64_t> window_unit_bytes() const { return window_unit_bytes_; }

 private:
  using Key = std::pair<std::uint32_t, MicroBatchOrder>;
  struct KeptPlans {
    std::uint64_t last_use = 0;
    std::optional<StepPlan> step;
    std::optional<ActivationPlan> activations;
  };

  static Key key(std::uint32_t micro_batches, MicroBatchOrder order);
  const StepPlan& step_plan(const Key& shape);
  // Returns the place for the plans of a step. If there are too many, the call drops those that
  // have not been used for the longest time. It never drops the plans of the last two steps.
  KeptPlans& keep(const Key& shape);
  StepPlan plan(Schedule schedule) const;
  ActivationPlan plan_activations_of(const ActivationShape& shape) const;

  const ModelSpec& model_;
  const Layout& layout_;
  const Placement& placement_;
  std::vector<std::uint64_t> window_unit_bytes_;
  StepPlan inference_;
  ActivationPlan inference_activations_;
  std::map<Key, KeptPlans> kept_;
  std::array<Key, 2> begun_{};  // the last two that have begun; the newest is the first
  std::uint64_t uses_ = 0;
};

}  // namespace sluice
