// The sequence of unit uses in one step, known in advance from the model's orders. Prefetch,
// eviction and the last gradients of units follow from this sequence. Pure.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include <sluice/config.h>
#include <sluice/ids.h>
#include <sluice/model_spec.h>
#include <sluice/use.h>

namespace sluice {

struct ScheduledUse {
  UnitId unit{};
  Pass pass = Pass::kForward;
  // Whether the gradient of this use is the unit's first or last gradient in the step. The value is
  // always false in forward and for frozen units.
  bool first_gradient = false;
  bool final_gradient = false;
};

using Schedule = std::vector<ScheduledUse>;

// `model` must be validated(); micro_batches >= 1.
Schedule training_schedule(const ModelSpec& model, std::uint32_t micro_batches,
                           MicroBatchOrder order = MicroBatchOrder::kHorizontal);

// Sets first_gradient and last_gradient of each backward use in the schedule.
void mark_gradients(const ModelSpec& model, Schedule& schedule);

// Returns `expected` up to `acquired`, then the unexpected use, then the uses that may still come.
// If `expected` has the unexpected use at a later place, only the uses after this place may still
// come. Otherwise all remaining uses may still come. From `acquired` on, the result marks no use as
// its unit's first or last gradient, because that is not known yet.
Schedule changed_schedule(const Schedule& expected, std::uint32_t acquired, UnitId unit, Pass pass);

// One forward pass without gradients.
Schedule inference_schedule(const ModelSpec& model);

}  // namespace sluice
