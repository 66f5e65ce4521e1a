// The order in which a step's micro-batches go through the units: what each order moves, and which
// one `batch.order: auto` takes. Vertical order saves the parameters that horizontal order fetches
// again for every micro-batch. Its price is the room and the traffic of the activations between
// units, of all micro-batches at once. Pure; any thread.
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
  std::string obstacle;  // why it cannot be; then nothing below holds
  Traffic traffic;       // a step's
  // Parameters and activations, between host and device, a step.
  std::uint64_t copied_bytes = 0;
};

// Horizontal, then vertical. The activations of `config` have the step's micro-batches; `model` is
// validated().
std::array<OrderPlan, 2> plan_orders(const Config& config, const ModelSpec& model,
                                     const RunMachine& machine);

// The order that "auto" takes: vertical if it is possible and moves fewer bytes to and from
// storage, or as many there and fewer between host and device. Horizontal where backward uses a
// unit more than once (tied weights): there the order changes bits, and a budget must not.
MicroBatchOrder better_order(const std::array<OrderPlan, 2>& plans, const ModelSpec& model);

// Settles `order`, and the activations' order with it, alike on all ranks that have the same config
// and machine.
void resolve_order(TrainConfig& config, const RunMachine& machine);

// "micro-batches vertical: ... ; horizontal: ...": a line for people.
std::string describe(const std::array<OrderPlan, 2>& plans, MicroBatchOrder chosen);

}  // namespace sluice
