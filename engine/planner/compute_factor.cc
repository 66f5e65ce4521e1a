#include "engine/planner/compute_factor.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include <sluice/units.h>
#include "engine/planner/plan_subject.h"

namespace sluice {
namespace {

constexpr double kHidden = 1.05;
constexpr double kLogFactorMax = 20;
constexpr double kPrecision = 0.01;  // 1 %

// Finds where computation makes up a step's time. Factors are logarithms to the base 2.
class FactorSearch {
 public:
  FactorSearch(const Planning& planning, const PlannedPlacement& own)
      : planning_(planning), own_(own) {
    // Not before computation takes as long as the busiest other resource, and seldom much later.
    double others_s = 0;
    for (std::size_t i = 0; i < kResourceCount; ++i) {
      if (static_cast<Resource>(i) != Resource::kCompute)
        others_s = std::max(others_s, own.step.busy_s[i]);
    }
    least_ = std::log2(std::max(others_s / own.compute_s, 1e-6)) - 0.5;
  }

  bool hides(double log_factor) const {
    const Rates rates = planning_.rates(std::exp2(log_factor));
    return planning_.step_of(own_.placement, own_.policy, rates).step_s <=
           kHidden * planning_.compute_s(rates);
  }

  std::optional<double> find(double precision = kPrecision) const {
    double high = least_ + 3.5;
    if (!hides(high)) high = least_ + kLogFactorMax;
    if (high == least_ + kLogFactorMax && !hides(high)) return std::nullopt;
    return bisect(least_, high, precision);
  }

  // Searches around a guess; this costs two simulations if the guess is good.
  std::optional<double> find_near(double guess) const {
    for (double reach = kPrecision / 2; reach < 0.5; reach *= 4) {
      const std::array<double, 2> ends = {guess - reach, guess + reach};
      std::array<bool, 2> is_hidden{};
      for_each_at_once(2, [&](std::size_t i) { is_hidden[i] = hides(ends[i]); });
      if (!is_hidden[0] && is_hidden[1]) return bisect(ends[0], ends[1], kPrecision);
    }
    return find();
  }

 private:
  double bisect(double low, double high, double precision) const {
    while (high - low > precision) {
      const double middle = (low + high) / 2;
      (hides(middle) ? high : low) = middle;
    }
    return high;
  }

  const Planning& planning_;
  const PlannedPlacement& own_;
  double least_ = 0;
};

// Enough blocks to show the middle of a step; a plan with fewer than the second number is quick.
constexpr std::uint64_t kBlocksEnough = 8 << 10;
constexpr std::uint64_t kBlocksMany = 64 << 10;
constexpr std::size_t kUnitsLeast = 16;

bool are_alike(const ModelSpec& model, const std::vector<double>& flops) {
  const auto& units = model.units;
  const auto is_as_first = [&](const UnitSpec& unit) {
    return unit.is_frozen == units.front().is_frozen &&
           std::ranges::equal(unit.tensors, units.front().tensors, {}, &TensorSpec::element_count,
                              &TensorSpec::element_count);
  };
  const auto all_equal = [](const auto& values) {
    return std::ranges::adjacent_find(values, std::not_equal_to()) == values.end();
  };
  return model.forward_order.empty() && model.backward_order.empty() &&
         std::ranges::all_of(units, is_as_first) && all_equal(flops) &&
         all_equal(model.boundary_bytes);
}

// The request with `kept` units, and with budgets for as large a share of them in each tier, beside
// the same buffers.
PlanRequest scaled_down(const PlanRequest& request, const Layout& layout,
                        const PlannedPlacement& own, std::size_t kept) {
  const std::size_t units = request.model.units.size();
  PlanRequest small = request;
  small.model.units.resize(kept);
  small.forward_flops.resize(kept);
  if (!small.model.boundary_bytes.empty()) small.model.boundary_bytes.resize(kept - 1);
  small.config.optimizer.groups.clear();  // they may name tensors of dropped units
  small.config.storage.block_elements = layout.block_elements();
  const Placement& placement = own.placement;
  const double left_out = 1 - static_cast<double>(kept) / static_cast<double>(units);
  const auto scaled = [&](std::uint64_t all_bytes, std::uint64_t home_bytes) {
    return all_bytes - static_cast<std::uint64_t>(left_out * static_cast<double>(home_bytes));
  };
  const std::uint64_t unit_bytes = div_ceil(layout.state_bytes(), units);  // for rounding
  small.config.memory.device_bytes =
      scaled(placement.device_bytes(), placement.resident_parameter_bytes +
                                           placement.device_gradient_bytes +
                                           placement.device_record_bytes + placement.tally_bytes) +
      unit_bytes;
  small.config.memory.host_bytes =
      scaled(placement.host_bytes(), placement.gradient_set_bytes + placement.host_parameter_bytes +
                                         placement.host_record_bytes + placement.tally_bytes +
                                         placement.host_activation_bytes) +
      unit_bytes;
  return small;
}

std::optional<double> factor_of_fewer(const PlanRequest& request, const Layout& layout,
                                      const PlannedPlacement& own, std::size_t kept) {
  const PlanRequest fewer = scaled_down(request, layout, own, kept);
  const Planning planning(fewer);
  PlannedPlacement planned = planning.place("config", fewer.config.placement);
  if (!planned.obstacle.empty() || planned.policy != own.policy) return std::nullopt;
  planned.step = planning.step_of(planned.placement, planned.policy, planning.rates());
  return FactorSearch(planning, planned).find(kPrecision / 4);
}

// The beginning and end of a step add the same time for any number of units, so their share is
// proportional to one over that number. Two models with fewer units then predict the whole one.
std::optional<double> guess_factor(const PlanRequest& request, const Layout& layout,
                                   const PlannedPlacement& own) {
  const std::size_t units = request.model.units.size();
  const std::size_t blocks = layout.blocks().size();
  const std::size_t more = div_ceil(units * kBlocksEnough, blocks);
  const std::size_t fewer = more / 2;
  if (blocks < kBlocksMany || fewer < kUnitsLeast ||
      !are_alike(request.model, request.forward_flops))
    return std::nullopt;
  std::array<std::optional<double>, 2> factors;
  for_each_at_once(2, [&](std::size_t i) {
    factors[i] = factor_of_fewer(request, layout, own, i == 0 ? fewer : more);
  });
  if (!factors[0] || !factors[1]) return std::nullopt;
  const auto share = [](std::size_t count) { return 1 / static_cast<double>(count); };
  const double slope = (*factors[1] - *factors[0]) / (share(more) - share(fewer));
  return *factors[1] + slope * (share(units) - share(more));
}

}  // namespace

std::optional<double> compute_factor_that_hides(const PlanRequest& request,
                                                const PlannedPlacement& own) {
  if (!own.obstacle.empty()) return std::nullopt;
  const Planning planning(request);
  const FactorSearch search(planning, own);
  const std::optional<double> guess = guess_factor(request, planning.layout(), own);
  const std::optional<double> found = guess ? search.find_near(*guess) : search.find();
  return found ? std::optional(std::exp2(*found)) : std::nullopt;
}

}  // namespace sluice
