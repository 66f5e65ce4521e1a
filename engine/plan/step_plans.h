// Everything that is known about a step before the step runs: the schedule, the places of units in
// the device window, and the movement of boundary activations. The sequence of activations stays
// the same even if the schedule changes. A plan is made once for each number and order of
// micro-batches, and kept.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "engine/plan/traffic.h"

namespace sluice {

struct StepPlan {
  Schedule schedule;
  WindowPlan window;
};

class StepPlans {
 public:
  // All arguments must outlive the plans. `model` is validated(). The constructor already plans an
  // inference and a step of one micro-batch.
  // Fails with kOutOfMemory if the window cannot hold the leases.
  StepPlans(const ModelSpec& model, const Layout& layout, const Placement& placement);

  const StepPlan& inference() const { return inference_; }
  // The reference stays valid.
  const StepPlan& training(std::uint32_t micro_batches, MicroBatchOrder order);

  // The plan is empty if the application keeps activations. References stay valid.
  const ActivationPlan& inference_activations() const { return inference_activations_; }
  // Fails with kInvalidArgument if the step is too large for the activation pools.
  const ActivationPlan& activations(std::uint32_t micro_batches, MicroBatchOrder order);

  // The plan of a step that has followed `plan` up to `progress`, and then uses `unit` instead of
  // the planned unit. If an inference begins anew after its end, the inference has another batch.
  // The plan then expects that the number of batches doubles. So a few changes are enough for any
  // number of batches.
  // Fails with kOutOfMemory if the window cannot hold `unit` beside the leased units.
  StepPlan changed(const StepPlan& plan, const WindowProgress& progress, UnitId unit,
                   Pass pass) const;
  // From now on, inferences are expected to follow `schedule`, or steps are expected to have this
  // shape. The call has no effect if the window cannot be planned for such steps.
  void expect_inference(Schedule schedule);
  void expect_training(std::uint32_t micro_batches, MicroBatchOrder order, Schedule schedule);
  Traffic predict_traffic(std::uint32_t micro_batches, MicroBatchOrder order);

  // The bytes that each unit needs in the device window. A unit homed on the device needs 0 bytes.
  std::span<const std::uint64_t> window_unit_bytes() const { return window_unit_bytes_; }

 private:
  static std::pair<std::uint32_t, MicroBatchOrder> key(std::uint32_t micro_batches,
                                                       MicroBatchOrder order);
  StepPlan plan(Schedule schedule) const;
  ActivationPlan plan_activations_of(const ActivationShape& shape) const;

  const ModelSpec& model_;
  const Layout& layout_;
  const Placement& placement_;
  std::vector<std::uint64_t> window_unit_bytes_;
  StepPlan inference_;
  ActivationPlan inference_activations_;
  std::map<std::pair<std::uint32_t, MicroBatchOrder>, StepPlan> training_;
  std::map<std::pair<std::uint32_t, MicroBatchOrder>, ActivationPlan> activations_;
};

}  // namespace sluice
