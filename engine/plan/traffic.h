// The bytes that one step moves between host and storage, known before it runs: the fetches of the
// window plan, and the reads and writes of the optimizer pass. Also the meter by which the run
// checks itself.
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

// Counts the bytes that a queue moves for steps.
class TrafficMeter {
 public:
  // `queue` must outlive the meter, which counts from resume() on.
  explicit TrafficMeter(const IoQueue& queue) : queue_(queue) {}

  // Bytes moved between pause() and resume() are not counted.
  void pause();
  void resume();
  // The traffic counted since the last call.
  Traffic take();

 private:
  const IoQueue& queue_;
  Traffic counted_;
  IoCounters at_resume_;
};

// The storage bytes of those parameters of `unit` that are homed there.
std::uint64_t nvme_parameter_bytes(const Layout& layout, const Placement& placement, UnitId unit);

// The bytes that a step writes of gradients that wait on storage; it reads as many. Backward uses
// write their unit's gradients; all but the first read the sum so far; the update reads the last.
std::uint64_t gradient_spill_bytes(const Layout& layout, const Placement& placement,
                                   const Schedule& schedule);

// One step: every fetch of `plan`, each block's state once in and once out, and the bytes
// that `activations` moves. A speculative step that is redone moves each block's state once
// more.
Traffic predict_step_traffic(const Layout& layout, const Placement& placement,
                             const Schedule& schedule, const WindowPlan& plan,
                             const ActivationPlan& activations = {});

}  // namespace sluice
