// The functions choose the order in which a step's micro-batches go through the units. The
// functions compute the traffic of each order, and choose an order if `batch.order` is "auto".
// Horizontal order fetches the parameters again for every micro-batch, and vertical order does not.
// However, vertical order keeps the boundary activations of all micro-batches at the same time. The
// kept activations need memory and cause traffic. The functions are pure.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/plan.h>
#include "engine/plan/step_plans.h"

namespace sluice {

struct OrderPlan {
  MicroBatchOrder order{};
  std::string obstacle;  // why the order is impossible; empty = the order is possible
  Traffic traffic;       // the traffic of a step
  // The parameter and activation bytes that a step copies between host and device.
  std::uint64_t copied_bytes = 0;
};

// Returns the plan for horizontal order, followed by the plan for vertical order.
// `config.activations` gives the number of micro-batches. `model` must come from validated().
std::array<OrderPlan, 2> plan_orders(const Config& config, const ModelSpec& model,
                                     const RunMachine& machine);

// Returns the order that "auto" chooses. If only one order is possible, the result is this order.
// If both orders are possible, the result is the order that moves fewer bytes to and from storage.
// If both orders have the same traffic to and from storage, the result is the order that moves
// fewer bytes between host and device. If the order changes bits, "auto" always chooses horizontal
// order, because a choice that depends on a memory budget must not change bits.
MicroBatchOrder better_order(const std::array<OrderPlan, 2>& plans, const ModelSpec& model,
                             const Config& config, std::uint32_t ranks);

// Returns whether the order of the micro-batches changes the bits of the result. This is so in two
// cases. If the backward pass uses a unit more than once, as with tied weights, the gradients of
// the uses are added in their order. If each rank adds its micro-batches before the ranks add
// theirs, as in horizontal order at sharding.stage 0 and 1, the sums are rounded at other points.
bool order_changes_bits(const Config& config, std::uint32_t micro_batches, bool is_tied,
                        std::uint32_t ranks);

// Returns a line for people, such as "micro-batches vertical: ... ; horizontal: ...".
std::string describe(const std::array<OrderPlan, 2>& plans, MicroBatchOrder chosen);

}  // namespace sluice
