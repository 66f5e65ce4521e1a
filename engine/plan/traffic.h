// The functions predict the bytes that one step moves between host and storage. The number of these
// bytes is known before the step runs. The number includes the bytes that the window plan fetches,
// and the bytes that the optimizer pass reads and writes. A meter counts the bytes of the real
// steps for comparison.
//
// Thread rule: the predictions are pure. A meter may be used by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <sluice/step_report.h>
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "engine/plan/window_plan.h"
#include "io/io_queue.h"

namespace sluice {

// The meter counts the bytes that a queue moves for steps, drive by drive.
class TrafficMeter {
 public:
  // `queue` must outlive the meter. The meter begins to count when resume() is called.
  TrafficMeter(const IoQueue& queue, std::size_t drives)
      : queue_(queue), counted_(drives), at_resume_(drives) {}

  // Bytes moved between pause() and resume() are not counted.
  void pause();
  void resume();
  // The traffic of each drive, counted since the last call.
  std::vector<DriveTraffic> take();

 private:
  const IoQueue& queue_;
  std::vector<DriveTraffic> counted_;  // by drive
  std::vector<IoCounters> at_resume_;  // by drive
};

// Returns how many bytes of the parameters of `unit` have their home on storage.
std::uint64_t nvme_parameter_bytes(const Layout& layout, const Placement& placement, UnitId unit);

// The bytes of state that an update of `unit` reads from storage. The update writes the same number
// of bytes.
std::uint64_t nvme_update_bytes(const Layout& layout, const Placement& placement, UnitId unit);

// The bytes of one gradient of `unit` that waits on storage.
std::uint64_t nvme_gradient_bytes(const Layout& layout, const Placement& placement, UnitId unit);

// The result says for each unit whether `schedule` uses the unit in backward.
std::vector<bool> units_with_gradients(const Layout& layout, const Schedule& schedule);

// The result says for each unit whether a step that follows `schedule` updates the unit.
std::vector<bool> updated_units(const Layout& layout, const Placement& placement,
                                const Schedule& schedule);

// Returns the number of bytes of gradients that a step writes to storage. The gradients wait there
// for the update. The step reads the same number of bytes. Every backward use writes its unit's sum
// of gradients. Each backward use of a unit, except the first, also reads the sum that the previous
// backward use has written. The update reads the final sum.
std::uint64_t gradient_spill_bytes(const Layout& layout, const Placement& placement,
                                   const Schedule& schedule);

// Returns the number of bytes of zeros that a step writes to storage, where they wait as gradients.
// The step reads the same number of bytes. Zeros are the gradients of units that get none in
// backward, such as announced units that a step does not use, if the update changes these units.
std::uint64_t zero_spill_bytes(const Layout& layout, const Placement& placement,
                               const Schedule& schedule);

// The traffic of one step. The traffic is the sum of three parts. The first part is the bytes of
// all fetches of `plan`. The second part is the state of each updated block, which is read once and
// written once. The third part is the bytes that `activations` moves. If a speculative step is
// redone, each block's state is moved once more.
Traffic predict_step_traffic(const Layout& layout, const Placement& placement,
                             const Schedule& schedule, const WindowPlan& plan,
                             const ActivationPlan& activations = {});

}  // namespace sluice
