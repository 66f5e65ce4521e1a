#include "tools/trace/trace_steps.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace sluice {
namespace {

// Less than this share of a step is not worth an advice.
constexpr double kWorthwhile = 0.1;

// The cause that took most of the exposed time.
StallCause main_cause(const std::vector<StepShare>& steps) {
  std::array<std::int64_t, kStallCauses> sums{};
  for (const StepShare& step : steps) {
    for (std::size_t cause = 0; cause < kStallCauses; ++cause) sums[cause] += step.by_cause[cause];
  }
  return static_cast<StallCause>(std::ranges::max_element(sums) - sums.begin());
}

}  // namespace

std::size_t ended_steps(const TraceAnalysis& rank) {
  const std::vector<StepShare>& steps = rank.steps();
  return steps.size() - (!steps.empty() && steps.back().is_open ? 1 : 0);
}

std::size_t first_steady(const TraceAnalysis& rank) {
  const std::size_t ended = ended_steps(rank);
  return ended > 1 && !rank.trace().lacks_first_steps ? 1 : 0;
}

std::vector<StepShare> steady_steps(const TraceAnalysis& rank) {
  const auto at = [&](std::size_t index) {
    return rank.steps().begin() + static_cast<std::ptrdiff_t>(index);
  };
  return {at(first_steady(rank)), at(ended_steps(rank))};
}

std::vector<StepShare> updated_steps(const TraceAnalysis& rank) {
  const std::vector<StepShare>& all = rank.steps();
  const auto is_skipped = [&](std::size_t place) {
    return place + 1 < all.size() && all[place + 1].step == all[place].step;
  };
  std::vector<StepShare> steps;
  for (std::size_t place = first_steady(rank); place < ended_steps(rank); ++place) {
    if (!is_skipped(place) && (place == 0 || !is_skipped(place - 1))) steps.push_back(all[place]);
  }
  return steps;
}

StepMeans means_of(const std::vector<StepShare>& steps) {
  StepMeans means{.count = steps.size()};
  if (steps.empty()) return means;
  const auto mean = [&](const auto& part_of) {
    double sum_ns = 0;
    for (const StepShare& step : steps) sum_ns += static_cast<double>(part_of(step));
    return sum_ns * 1e-9 / static_cast<double>(steps.size());
  };
  means.total_s = mean([](const StepShare& step) { return step.total_ns(); });
  means.compute_s = mean([](const StepShare& step) { return step.compute_ns; });
  means.exposed_io_s = mean([](const StepShare& step) { return step.exposed_io_ns; });
  means.exposed_optimizer_s = mean([](const StepShare& step) { return step.exposed_optimizer_ns; });
  means.other_s = mean([](const StepShare& step) { return step.other_ns; });
  means.background_s = mean([](const StepShare& step) { return step.background_ns; });
  means.hidden_s = mean([](const StepShare& step) { return step.hidden_ns(); });
  const auto [least, most] =
      std::ranges::minmax(steps, {}, [](const StepShare& step) { return step.total_ns(); });
  means.least_s = static_cast<double>(least.total_ns()) * 1e-9;
  means.most_s = static_cast<double>(most.total_ns()) * 1e-9;
  return means;
}

std::string verdict_of(const TraceAnalysis& rank) {
  const std::vector<StepShare> steps = steady_steps(rank);
  const StepMeans means = means_of(steps);
  if (means.total_s <= 0) return "no step ended while it was traced";
  const auto percent = [&](double part_s) { return 100 * means.share_of_step(part_s); };
  const double exposed_s = means.exposed_io_s + means.exposed_optimizer_s;
  if (exposed_s < kWorthwhile * means.total_s)
    return fmt::format(
        "{:.0f} % compute: nothing bought for I/O or the optimizer can save more than {:.1f} %",
        percent(means.compute_s), percent(exposed_s));
  return fmt::format(
      "{:.0f} % compute, {:.0f} % waits for I/O and the optimizer, most of it by cause \"{}\": "
      "what helps against all waits can save {:.1f} %",
      percent(means.compute_s), percent(exposed_s), name_of(main_cause(steps)), percent(exposed_s));
}

}  // namespace sluice
