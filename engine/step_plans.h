// What is known of a step before it runs: its schedule, and who is where in the device window. Made
// once for each number and order of micro-batches, and kept.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "engine/traffic.h"

namespace sluice {

struct StepPlan {
  Schedule schedule;
  WindowPlan window;
  ActivationPlan activations;  // empty where the application keeps them
};

class StepPlans {
 public:
  // All must outlive the plans. `model` is validated(). Plans an inference and a step of one
  // micro-batch at once.
  // Fails with: kOutOfMemory when the window cannot hold the leases.
  StepPlans(const ModelSpec& model, const Layout& layout, const Placement& placement);

  const StepPlan& inference() const { return inference_; }
  // The reference stays valid.
  // Fails with: kInvalidArgument for a step larger than the one that the pools for activations are
  // made for.
  const StepPlan& training(std::uint32_t micro_batches, MicroBatchOrder order);
  Traffic predict_traffic(std::uint32_t micro_batches, MicroBatchOrder order);

  // What each unit needs in the device window: 0 for units homed on the device.
  std::span<const std::uint64_t> window_unit_bytes() const { return window_unit_bytes_; }

 private:
  StepPlan plan(Schedule schedule, const ActivationShape& activations) const;

  const ModelSpec& model_;
  const Layout& layout_;
  const Placement& placement_;
  std::vector<std::uint64_t> window_unit_bytes_;
  StepPlan inference_;
  std::map<std::pair<std::uint32_t, MicroBatchOrder>, StepPlan> training_;
};

}  // namespace sluice
