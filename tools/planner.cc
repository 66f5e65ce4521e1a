#include "tools/planner.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "engine/sharding.h"

namespace sluice {
namespace {

constexpr double kHidden = 1.05;
constexpr double kLogFactorMax = 20;

// What "auto" comes to while clipping is rare, and the drives have room for shadow copies.
OverlapPolicy policy_of(const Config::Optimizer& optimizer, const Layout& layout,
                        const Placement& placement) {
  if (optimizer.overlap != OverlapPolicy::kAuto) return optimizer.overlap;
  if (optimizer.clip_norm == 0 && optimizer.non_finite == NonFinitePolicy::kStop)
    return OverlapPolicy::kEager;
  return shadows_serve_all(layout, placement) ? OverlapPolicy::kSpeculative
                                              : OverlapPolicy::kDeferred;
}

class Planning {
 public:
  explicit Planning(const PlanRequest& request)
      : request_(request),
        model_(validated(request.model)),
        layout_(model_, state_format(request.config), request.config.storage.block_elements, {},
                shard_of(request.config.sharding, 0, request.ranks)),
        schedule_(training_schedule(model_, request.micro_batches, request.order)),
        rates_(request.rates) {
    set_compute_factor(1);
  }

  void set_compute_factor(double factor) {
    rates_.units.clear();
    const double backward = request_.config.activations.home == ActivationHome::kKeep ? 2 : 3;
    for (const double flops : request_.forward_flops)
      rates_.units.push_back({.forward_s = factor * flops / request_.flops,
                              .backward_s = factor * backward * flops / request_.flops});
  }

  double compute_s() const {
    double sum_s = 0;
    for (const ScheduledUse& use : schedule_) {
      const UnitTime& time = rates_.units[index_of(use.unit)];
      sum_s += use.pass == Pass::kForward ? time.forward_s : time.backward_s;
    }
    return sum_s;
  }

  // With the policy's step, or why not.
  PlannedPlacement place(const std::string& name, const Config::Placement& choices) const {
    PlannedPlacement planned;
    planned.name = name;
    PlannedMemory memory = plan_memory(request_, model_, layout_, choices);
    planned.obstacle = std::move(memory.obstacle);
    if (!planned.obstacle.empty()) return planned;
    planned.placement = std::move(memory.placement);
    planned.policy = memory.policy;
    planned.compute_s = compute_s();
    planned.step = with_shape(planned.placement, [&](const StepShape& shape) {
      return bound_step(shape, planned.policy);
    });
    return planned;
  }

  void compare_policies(PlannedPlacement& planned) const {
    for (const OverlapPolicy policy : {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                       OverlapPolicy::kEager, OverlapPolicy::kSpeculative}) {
      planned.policies.emplace_back(
          policy, with_shape(planned.placement,
                             [&](const StepShape& shape) { return bound_step(shape, policy); }));
    }
    std::vector<StepCost> bounds;
    for (const auto& [policy, cost] : planned.policies) bounds.push_back(cost);
    planned.least = minimum_of(bounds);
  }

 private:
  StepCost with_shape(const Placement& placement, const auto& function) const {
    const WindowPlan window = plan_window(schedule_, window_unit_bytes(layout_, placement),
                                          placement.window_bytes, model_.concurrent_leases);
    const std::uint32_t places = placement.activation_window.count;
    const ActivationPlan activations =
        places == 0 ? ActivationPlan{}
                    : plan_activations({.model = model_,
                                        .micro_batches = request_.micro_batches,
                                        .order = request_.order},
                                       places);
    return function(StepShape{layout_, placement, schedule_, window, rates_, &activations});
  }

  const PlanRequest& request_;
  ModelSpec model_;
  Layout layout_;
  Schedule schedule_;
  Rates rates_;
};

}  // namespace

PlannedMemory plan_memory(const PlanRequest& request, const ModelSpec& model, const Layout& layout,
                          const Config::Placement& choices) {
  PlannedMemory planned;
  const Config& config = request.config;
  const PassNeeds needs{.overlaps = config.optimizer.overlap != OverlapPolicy::kSerial,
                        .lanes = config.optimizer.lanes,
                        .fills_device = request.fills_device,
                        .activations = config.activations};
  const std::uint64_t buffers = rank_buffer_bytes(config.sharding, request.ranks, layout);
  const std::uint64_t device = *config.memory.device_bytes;
  const Budgets budgets{.device_bytes = device - std::min(device, buffers),
                        .host_bytes = *config.memory.host_bytes};
  try {
    check_homes(config.sharding, request.ranks, choices);
    planned.placement = plan_placement(layout, model, choices, budgets, needs);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory && error.code() != ErrorCode::kConfig) throw;
    planned.obstacle = error.what();
    return planned;
  }
  planned.policy = policy_of(config.optimizer, layout, planned.placement);
  if (planned.policy == OverlapPolicy::kSpeculative) add_shadows(layout, planned.placement);
  return planned;
}

std::vector<PlannedPlacement> plan_alternatives(const PlanRequest& request) {
  check_homes(request.config.sharding, request.ranks, request.config.placement);
  const Planning planning(request);
  std::vector<PlannedPlacement> all = {
      planning.place("config", request.config.placement),
      planning.place("gpu", {.optimizer = TierChoice::kDevice}),
      planning.place("device", {.parameters = TierChoice::kDevice, .optimizer = TierChoice::kHost}),
      planning.place("host", {.parameters = TierChoice::kHost, .optimizer = TierChoice::kHost}),
      planning.place("nvme", {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme}),
      planning.place("mixed", {})};
  if (all.front().obstacle.empty()) planning.compare_policies(all.front());
  return all;
}

std::optional<double> compute_factor_that_hides(const PlanRequest& request) {
  Planning planning(request);
  const PlannedPlacement given = planning.place("config", request.config.placement);
  if (!given.obstacle.empty()) return std::nullopt;
  const auto hides = [&](double log_factor) {
    planning.set_compute_factor(std::exp2(log_factor));
    const PlannedPlacement planned = planning.place("config", request.config.placement);
    return planned.step.step_s <= kHidden * planned.compute_s;
  };
  // Not before computation takes as long as what is busiest beside it, and seldom much later.
  double others_s = 0;
  for (std::size_t i = 0; i < kResourceCount; ++i) {
    if (static_cast<Resource>(i) != Resource::kCompute)
      others_s = std::max(others_s, given.step.busy_s[i]);
  }
  double low = std::log2(std::max(others_s / given.compute_s, 1e-6)) - 0.5;
  double high = low + 3.5;
  if (!hides(high)) high = low + kLogFactorMax;
  if (high == low + kLogFactorMax && !hides(high)) return std::nullopt;
  while (high - low > 0.01) {  // to 1 %
    const double middle = (low + high) / 2;
    (hides(middle) ? high : low) = middle;
  }
  return std::exp2(high);
}

}  // namespace sluice
