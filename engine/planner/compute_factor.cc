#include "engine/planner/compute_factor.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "engine/planner/plan_evaluation.h"

namespace sluice {
namespace {

constexpr double kHidden = 1.05;
constexpr double kPrecision = 0.01;  // 1 %
// A model with fewer blocks is searched quickly without a guess.
constexpr std::uint64_t kBlocksMany = 4 * kBlocksOfAGlance;
// How far beyond the busiest resource the factor may be: by 3.5 in nearly all plans.
constexpr std::array kReaches{3.5, 7.0, 14.0, 20.0};

// Finds where computation makes up a step's time, with at most `blocks_max` simulated blocks.
// Factors are logarithms to the base 2.
class FactorSearch {
 public:
  FactorSearch(const PlanEvaluation& evaluation, const PlannedPlacement& own,
               std::uint64_t blocks_max)
      : evaluation_(evaluation), own_(own), blocks_max_(blocks_max) {
    // Not before computation takes as long as the busiest other resource, and seldom much later.
    double others_s = 0;
    for (std::size_t i = 0; i < kResourceCount; ++i) {
      if (static_cast<Resource>(i) != Resource::kCompute)
        others_s = std::max(others_s, own.step.busy_s[i]);
    }
    least_ = std::log2(std::max(others_s / own.compute_s, 1e-6)) - 0.5;
  }

  bool hides(double log_factor) const {
    const Rates rates = evaluation_.rates(std::exp2(log_factor));
    return evaluation_.step_of(own_.placement, own_.policy, rates, blocks_max_).step_s <=
           kHidden * evaluation_.compute_s(rates);
  }

  std::optional<double> find(double precision = kPrecision) const {
    double low = least_;
    for (const double reach : kReaches) {
      const double high = least_ + reach;
      if (hides(high)) return bisect(low, high, precision);
      low = high;
    }
    return std::nullopt;
  }

  // Searches around a guess; this costs two simulations if the guess is good.
  std::optional<double> find_near(double guess, const PlanRunner& run_each) const {
    for (double reach = kPrecision / 2; reach < 0.5; reach *= 4) {
      const std::array<double, 2> ends = {guess - reach, guess + reach};
      std::array<bool, 2> is_hidden{};
      run_each(2, [&](std::size_t i) { is_hidden[i] = hides(ends[i]); });
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

  const PlanEvaluation& evaluation_;
  const PlannedPlacement& own_;
  const std::uint64_t blocks_max_;
  double least_ = 0;
};

}  // namespace

std::optional<double> compute_factor_that_hides(const PlanRequest& request,
                                                const PlannedPlacement& own) {
  // Activations that leave the device grow with the computation.
  if (!own.obstacle.empty() || own.step.traffic.activation_out_bytes != 0) return std::nullopt;
  const PlanEvaluation evaluation(request);
  const FactorSearch search(evaluation, own, kBlocksSimulatedMax);
  std::optional<double> guess;
  if (evaluation.layout().blocks().size() > kBlocksMany)
    guess = FactorSearch(evaluation, own, kBlocksOfAGlance).find(kPrecision / 4);
  const std::optional<double> found =
      guess ? search.find_near(*guess, request.run_each) : search.find();
  return found ? std::optional(std::exp2(*found)) : std::nullopt;
}

}  // namespace sluice
