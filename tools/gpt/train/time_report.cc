// Where the time of the steps went, and how near it came to the limits.
#include <algorithm>
#include <cstdint>
#include <limits>

#include <fmt/format.h>

#include "base/trace/trace_clock.h"
#include "tools/gpt/train/train_report.h"

namespace sluice {
namespace {

// The limits are made of mean rates, so a mean step may beat them by some percent.
constexpr double kNoisePercentMax = 110;

// Seconds a step for which updates went on between steps, and no step waited for them.
double between_steps_s(const RunRecord& run, std::size_t first) {
  std::int64_t between_ns = 0;
  for (std::size_t i = first + 1; i < run.steps.size(); ++i)
    between_ns += std::max<std::int64_t>(
        0, run.steps[i].times.work_before.any_ns - run.steps[i - 1].drained_ns);
  return static_cast<double>(between_ns) * 1e-9 / static_cast<double>(run.steps.size() - first);
}

std::string reason_of_share(double percent, double between_s, double mean_s) {
  if (percent <= 100) return {};
  if (between_s > 0.05 * mean_s)
    return fmt::format(
        "a share above 100 % is no gain: updates went on for {:.3f} s per step between the steps, "
        "where something else took its time, such as a checkpoint\n",
        between_s);
  if (percent <= kNoisePercentMax)
    return "a share above 100 % is noise: the limits are made of mean rates, which vary from step "
           "to step\n";
  return "a share this far above 100 % says that the limits' rates are too low: this machine was "
         "slower when they were measured, or a calibration (storage.calibration) is of other "
         "drives\n";
}

// Against the mean of the steps with an update.
std::string limits_report(const RunRecord& run, std::size_t first) {
  std::int64_t total_ns = 0;
  std::size_t count = 0;
  for (std::size_t i = first; i < run.steps.size(); ++i) {
    if (!has_update(run, i)) continue;
    total_ns += run.steps[i].times.total_ns;
    ++count;
  }
  const std::size_t left_out = run.steps.size() - first - count;
  if (count == 0) return "no two steps in a row had an update to compare with the limits\n";
  const double mean_s = static_cast<double>(total_ns) * 1e-9 / static_cast<double>(count);
  const auto share = [&](const StepCost& limit) { return 100 * limit.step_s / mean_s; };
  const auto part = [&](const StepCost& limit) {
    return fmt::format("{:.1f} % of {:.3f} s", share(limit), limit.step_s);
  };
  return fmt::format("the mean step of {:.3f} s{} reaches {} (T_min, {}) and {} (T_bound, {})\n",
                     mean_s,
                     left_out == 0 ? ""
                                   : fmt::format(", without {} that were skipped or came right "
                                                 "after one,",
                                                 left_out),
                     part(run.limits->least), name_of(run.limits->least.scarcest()),
                     part(run.limits->bound), name_of(run.limits->policy)) +
         reason_of_share(std::max(share(run.limits->least), share(run.limits->bound)),
                         between_steps_s(run, first), mean_s);
}

// The same training in memory, as far as computation alone tells. Updates and transfers beside
// computation make it slower on a host, so the least of the steps counts.
std::string in_memory_estimate(const RunRecord& run, std::size_t first, double mean_s) {
  std::int64_t least_ns = std::numeric_limits<std::int64_t>::max();
  for (std::size_t i = first; i < run.steps.size(); ++i)
    least_ns = std::min(least_ns, run.steps[i].times.compute_ns);
  const double least_s = static_cast<double>(least_ns) * 1e-9;
  return fmt::format(
      "computation alone, the least of these steps, takes {:.3f} s, {:.1f} % of the mean step; "
      "--compare-memory measures the same training in memory\n",
      least_s, 100 * least_s / mean_s);
}

}  // namespace

bool has_update(const RunRecord& run, std::size_t place) {
  return !run.steps[place].skipped && (place == 0 || !run.steps[place - 1].skipped);
}

void drain_step(Engine& engine, TrainedStep& trained) {
  const std::uint64_t begin_ns = steady_now_ns();
  engine.drain();
  trained.drained_ns = static_cast<std::int64_t>(steady_now_ns() - begin_ns);
  StepTimes& times = trained.report.times;
  times.total_ns += trained.drained_ns;
  times.exposed_optimizer_ns += trained.drained_ns;
  times.work.any_ns += trained.drained_ns;  // of the update that was waited for
}

// Means over all steps except the first, as tools/trace/trace_steps.h takes them from a trace, so
// that both say the same of one run.
std::string time_report(const RunRecord& run) {
  StepTimes sum;
  std::int64_t hidden_ns = 0, worked_ns = 0;
  const std::size_t first = run.steps.size() > 1 ? 1 : 0;
  for (std::size_t i = first; i < run.steps.size(); ++i) {
    const StepTimes& times = run.steps[i].times;
    sum.total_ns += times.total_ns;
    sum.compute_ns += times.compute_ns;
    sum.exposed_io_ns += times.exposed_io_ns;
    sum.exposed_optimizer_ns += times.exposed_optimizer_ns;
    sum.other_ns += times.other_ns;
    hidden_ns += times.hidden_ns();
    worked_ns += times.work.any_ns;
  }
  if (sum.total_ns == 0) return {};
  const auto percent = [&](std::int64_t part_ns) {
    return 100 * static_cast<double>(part_ns) / static_cast<double>(sum.total_ns);
  };
  std::string text = fmt::format(
      "steps: compute {:.1f} %, exposed I/O {:.1f} %, exposed optimizer {:.1f} %, other {:.1f} %; "
      "hidden {:.1f} % of I/O and optimizer\n",
      percent(sum.compute_ns), percent(sum.exposed_io_ns), percent(sum.exposed_optimizer_ns),
      percent(sum.other_ns),
      worked_ns <= 0 ? 100.0
                     : 100 * static_cast<double>(hidden_ns) / static_cast<double>(worked_ns));
  if (!run.in_memory)
    text += in_memory_estimate(
        run, first,
        static_cast<double>(sum.total_ns) * 1e-9 / static_cast<double>(run.steps.size() - first));
  return run.limits ? text + limits_report(run, first) : text;
}

}  // namespace sluice
