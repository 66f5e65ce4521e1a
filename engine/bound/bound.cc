#include "engine/bound/bound.h"

#include <algorithm>

#include <sluice/error.h>
#include "engine/bound/bound_simulation.h"

namespace sluice {
namespace {

void add_busy(StepCost& cost, Resource resource, std::uint64_t count, double rate) {
  if (rate > 0)
    cost.busy_s[static_cast<std::size_t>(resource)] += static_cast<double>(count) / rate;
}

// Adds bytes that storage moves once in a step.
void add_storage(const StepShape& shape, std::uint64_t read_bytes, std::uint64_t write_bytes,
                 StepCost& cost) {
  const bool is_half = shape.rates.duplex == Duplex::kHalf;
  add_busy(cost, is_half ? Resource::kStorage : Resource::kStorageRead, read_bytes,
           shape.rates.read_bytes_per_second);
  add_busy(cost, is_half ? Resource::kStorage : Resource::kStorageWrite, write_bytes,
           shape.rates.write_bytes_per_second);
  add_busy(cost, Resource::kHostMemory, read_bytes + write_bytes,
           shape.rates.host_memory_bytes_per_second);
  cost.traffic.nvme_read_bytes += read_bytes;
  cost.traffic.nvme_write_bytes += write_bytes;
}

// A use finds the parameters that the late update has read and made, and does not read them again.
void add_late_units(const StepShape& shape, StepCost& cost) {
  if (shape.late_units.empty()) return;
  for (const LateUnit& late : shape.late_units) {
    const std::uint64_t bytes = nvme_update_bytes(shape.layout, shape.placement, late.unit);
    add_storage(shape, bytes - nvme_parameter_bytes(shape.layout, shape.placement, late.unit),
                bytes, cost);
    add_busy(cost, Resource::kCpu,
             late.missed_updates * shape.layout.unit(late.unit).shard_elements,
             shape.rates.adam_parameters_per_second);
    // A unit makes up for all missed updates of a block at once, while the block is in a cache.
    add_busy(cost, Resource::kHostMemory,
             shape.layout.unit(late.unit).shard_elements *
                 static_cast<std::uint64_t>(update_bytes_per_element(shape.layout.format())),
             shape.rates.host_memory_bytes_per_second);
  }
  cost.step_s = std::max(cost.step_s, std::ranges::max(cost.busy_s));
}

void add_activations(const StepShape& shape, StepCost& cost) {
  if (shape.activations == nullptr) return;
  const ActivationPlan& plan = *shape.activations;
  add_busy(cost, Resource::kCopyUp, plan.fetched_bytes, shape.rates.up_bytes_per_second);
  add_busy(cost, Resource::kCopyDown, plan.stored_bytes, shape.rates.down_bytes_per_second);
  add_busy(cost, Resource::kHostMemory, plan.fetched_bytes + plan.stored_bytes,
           shape.rates.host_memory_bytes_per_second);
  if (shape.placement.nvme_activation_bytes != 0)
    add_storage(shape, plan.fetched_bytes, plan.stored_bytes, cost);
  cost.traffic.activation_in_bytes = plan.fetched_bytes;
  cost.traffic.activation_out_bytes = plan.stored_bytes;
  cost.step_s = std::max(cost.step_s, std::ranges::max(cost.busy_s));
}

}  // namespace

StepCost bound_step(const StepShape& shape, OverlapPolicy policy) {
  StepCost cost = simulate_steps(shape, policy);
  cost.traffic.gradient_spill_bytes =
      gradient_spill_bytes(shape.layout, shape.placement, shape.schedule);
  add_late_units(shape, cost);
  add_activations(shape, cost);
  cost.step_s = std::max(cost.step_s, cost.busy(Resource::kHostMemory));
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
