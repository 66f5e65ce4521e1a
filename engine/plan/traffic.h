// The bytes that one step moves between host and storage, known before it runs: what the window
// plan fetches, and what the optimizer pass reads and writes; and the meter that the run checks
// itself with.
//
// Thread rule: the predictions are pure; one thread at a time uses a meter.
#pragma once

#include <cstdint>

#include <sluice/step_report.h>
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "engine/plan/window_plan.h"
#include "io/io_queue.h"

namespace sluice {

// Counts what a queue moves for steps.
class TrafficMeter {
 public:
  // `queue` must outlive the meter, which counts from resume() on.
  explicit TrafficMeter(const IoQueue& queue) : queue_(queue) {}

  // What is moved between the two is not counted.
  void pause();
  void resume();
  // What has been counted since the last call.
  Traffic take();

 private:
  const IoQueue& queue_;
  Traffic counted_;
  IoCounters at_resume_;
};

// Storage bytes of the parameters of `unit` that are homed there.
std::uint64_t nvme_parameter_bytes(const Layout& layout, const Placement& placement, UnitId unit);

// What a step writes of gradients that wait on storage, and as much reads: each backward use writes
// its unit's, all but the first read the sum so far, and the update reads the last.
std::uint64_t gradient_spill_bytes(const Layout& layout, const Placement& placement,
                                   const Schedule& schedule);

// One step: every fetch of `plan`, each block's state once in and once out, and what `activations`
// moves. A speculative step
// that is redone adds the latter once more.
Traffic predict_step_traffic(const Layout& layout, const Placement& placement,
                             const Schedule& schedule, const WindowPlan& plan,
                             const ActivationPlan& activations = {});

}  // namespace sluice
