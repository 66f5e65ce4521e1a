#include "engine/bound/bound.h"

#include <algorithm>

#include <sluice/error.h>
#include "engine/bound/bound_simulation.h"

namespace sluice {
namespace {

void add_activations(const StepShape& shape, StepCost& cost) {
  if (shape.activations == nullptr) return;
  const ActivationPlan& plan = *shape.activations;
  const auto add = [&](Resource resource, std::uint64_t bytes, double rate) {
    if (rate > 0)
      cost.busy_s[static_cast<std::size_t>(resource)] += static_cast<double>(bytes) / rate;
  };
  add(Resource::kCopyUp, plan.fetched_bytes, shape.rates.up_bytes_per_second);
  add(Resource::kCopyDown, plan.stored_bytes, shape.rates.down_bytes_per_second);
  if (shape.placement.nvme_activation_bytes != 0) {
    const bool is_half = shape.rates.duplex == Duplex::kHalf;
    add(is_half ? Resource::kStorage : Resource::kStorageRead, plan.fetched_bytes,
        shape.rates.read_bytes_per_second);
    add(is_half ? Resource::kStorage : Resource::kStorageWrite, plan.stored_bytes,
        shape.rates.write_bytes_per_second);
    cost.traffic.nvme_read_bytes += plan.fetched_bytes;
    cost.traffic.nvme_write_bytes += plan.stored_bytes;
  }
  cost.traffic.activation_in_bytes = plan.fetched_bytes;
  cost.traffic.activation_out_bytes = plan.stored_bytes;
  cost.step_s = std::max(cost.step_s, std::ranges::max(cost.busy_s));
}

}  // namespace

StepCost bound_step(const StepShape& shape, OverlapPolicy policy) {
  StepCost cost = simulate_steps(shape, policy);
  cost.traffic.gradient_spill_bytes =
      gradient_spill_bytes(shape.layout, shape.placement, shape.schedule);
  add_activations(shape, cost);
  return cost;
}

StepCost minimum_step(const StepShape& shape) {
  std::vector<StepCost> bounds;
  for (const OverlapPolicy policy : {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                     OverlapPolicy::kEager, OverlapPolicy::kSpeculative})
    bounds.push_back(bound_step(shape, policy));
  return minimum_of(bounds);
}

// Which policy moves the fewest bytes depends on the data still in memory when it is needed.
StepCost minimum_of(std::span<const StepCost> bounds) {
  SLUICE_CHECK(!bounds.empty(), "a minimum is over the policies");
  StepCost least;
  for (const StepCost& bound : bounds) {
    const double busy_s = std::ranges::max(bound.busy_s);
    if (&bound != &bounds.front() && busy_s >= least.step_s) continue;
    least = bound;
    least.step_s = busy_s;
  }
  return least;
}

}  // namespace sluice
