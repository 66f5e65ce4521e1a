// The functions choose the order in which a step's micro-batches go through the units. The
// functions compute the traffic of each order, and the choice for `batch.order: auto`. Vertical
// order saves the parameters that horizontal order fetches again for every micro-batch. In return,
// vertical order needs room and traffic for the activations between units. Vertical order needs the
// activations of all micro-batches at the same time. Pure; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include <sluice/plan.h>
#include "engine/plan/step_plans.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

struct OrderPlan {
  MicroBatchOrder order{};
  std::string obstacle;  // why the order is impossible; if set, the fields below mean nothing
  Traffic traffic;       // a step's
  // The parameter and activation bytes that a step copies between host and device.
  std::uint64_t copied_bytes = 0;
};

// Plans horizontal order, then vertical order. The activations in `config` state the step's number
// of micro-batches. `model` is validated().
std::array<OrderPlan, 2> plan_orders(const Config& config, const ModelSpec& model,
                                     const RunMachine& machine);

// The order that "auto" takes. Vertical order is taken if it is possible and moves fewer bytes to
// and from storage. If the two orders move the same number of bytes to and from storage, the order
// that moves fewer bytes between host and device is taken. If backward uses a unit more than once
// (tied weights), "auto" always takes horizontal order. If backward uses a unit more than once, the
// order changes bits. A budget must not change bits.
MicroBatchOrder better_order(const std::array<OrderPlan, 2>& plans, const ModelSpec& model);

// Sets `order` and the activations' order. The result is the same on all ranks with the same config
// and machine.
void resolve_order(TrainConfig& config, const RunMachine& machine);

// A line for people: "micro-batches vertical: ... ; horizontal: ...".
std::string describe(const std::array<OrderPlan, 2>& plans, MicroBatchOrder chosen);

}  // namespace sluice
