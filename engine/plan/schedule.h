// The sequence of unit uses in one step, known in advance from the model's orders: what prefetch,
// eviction and the final gradients follow from. Pure.
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
  // Backward only, and not of frozen units: nothing has been added to this unit's gradient in this
  // step before; and nothing will be after.
  bool first_gradient = false;
  bool final_gradient = false;
};

using Schedule = std::vector<ScheduledUse>;

// `model` must be validated(); micro_batches >= 1.
Schedule training_schedule(const ModelSpec& model, std::uint32_t micro_batches,
                           MicroBatchOrder order = MicroBatchOrder::kHorizontal);

// Says of each backward use whether it gives its unit's first or last gradient in the schedule.
void mark_gradients(const ModelSpec& model, Schedule& schedule);

// `expected` up to `acquired`, then a use that was not expected there, then what may still be: what
// comes after the use in `expected`, if it was to come, else all of the rest. Whether a gradient of
// the rest will be its unit's last, nobody knows now.
Schedule changed_schedule(const Schedule& expected, std::uint32_t acquired, UnitId unit, Pass pass);

// One forward pass without gradients.
Schedule inference_schedule(const ModelSpec& model);

}  // namespace sluice
