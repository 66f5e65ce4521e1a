// The leases that one use of a unit holds on the activations at the unit's boundaries. A trainer
// needs boundary leases if the engine keeps the activations that cross from unit to unit.
// Thread rule: only the thread that runs the step may use the object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <sluice/device.h>
#include <sluice/step.h>

namespace sluice {

struct BoundaryLeases {
  std::vector<ActivationLease> leases;
  std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::byte* output_gradient = nullptr;
  std::byte* input_gradient = nullptr;
};

// One use of a unit by one micro-batch. `forward_use` is the use's place in forward order.
struct BoundaryUse {
  std::uint32_t forward_use = 0;
  std::uint32_t use_count = 0;  // the number of uses in forward order
  std::uint32_t micro_batch = 0;
  Pass pass{};
};

// Takes the leases in the planned order (engine/plan/activation_plan.h). Until the leases end, the
// work on `stream` may use the leased memory. `walk` is a Step or an Inference.
template <class Walk>
BoundaryLeases take_boundaries(Walk& walk, const BoundaryUse& use, const Stream& stream) {
  BoundaryLeases held;
  const bool is_first = use.forward_use == 0;
  const bool is_last = use.forward_use + 1 == use.use_count;
  const auto take = [&](ActivationLease lease) {
    held.leases.push_back(std::move(lease));
    return held.leases.back().data();
  };
  const ActivationRef before{.boundary = use.forward_use - 1, .micro_batch = use.micro_batch};
  const ActivationRef behind{.boundary = use.forward_use, .micro_batch = use.micro_batch};
  const auto gradient = [](ActivationRef ref) {
    ref.kind = ActivationKind::kGradient;
    return ref;
  };
  if (!is_first) held.input = take(walk.load(before, stream));
  if (use.pass != Pass::kBackward) {
    if (!is_last) held.output = take(walk.save(behind, stream));
    return held;
  }
  if (!is_last) held.output_gradient = take(walk.load(gradient(behind), stream));
  if (!is_first) held.input_gradient = take(walk.save(gradient(before), stream));
  return held;
}

}  // namespace sluice
