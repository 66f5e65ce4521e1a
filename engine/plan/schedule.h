// A schedule is the sequence in which one step uses the units. The model's orders determine this
// sequence in advance. The sequence determines prefetch, eviction and the last gradients of units.
// The functions are pure.
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
  // The two values say whether the gradient of this use is the unit's first or last gradient in the
  // step. Both values are always false in the forward pass and for frozen units.
  bool first_gradient = false;
  bool final_gradient = false;
};

using Schedule = std::vector<ScheduledUse>;

// `model` is a result of validated(). `micro_batches` must be at least 1.
Schedule training_schedule(const ModelSpec& model, std::uint32_t micro_batches,
                           MicroBatchOrder order = MicroBatchOrder::kHorizontal);

// Sets first_gradient and final_gradient of each backward use in the schedule.
void mark_gradients(const ModelSpec& model, Schedule& schedule);

// Returns a schedule that consists of three parts: the first `acquired` uses of `expected`, the
// unexpected use, and the uses that may still come. If `expected` has a later use of `unit` in
// `pass`, only the uses after this later use may still come. Otherwise the uses that followed the
// unit's latest use in `pass` come again, up to `leases` - 1 of them: a module may need several
// units at the same time. All remaining uses may still come after those. After the first `acquired`
// uses, first_gradient and final_gradient are false in every use, because the first and last
// gradients are not known yet.
Schedule changed_schedule(const Schedule& expected, std::uint32_t acquired, UnitId unit, Pass pass,
                          std::uint32_t leases = 1);

// Returns the schedule of one forward pass without gradients.
Schedule inference_schedule(const ModelSpec& model);

}  // namespace sluice
