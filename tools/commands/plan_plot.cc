#include "tools/commands/plan_plot.h"

#include <fmt/format.h>

#include <sluice/units.h>
#include "engine/planner/budget_sweep.h"
#include "tools/report/svg_chart.h"

namespace sluice {
namespace {

constexpr std::size_t kBudgets = 24;

LineChart::Line busy_line(const std::vector<BudgetStep>& steps, Resource resource) {
  LineChart::Line line{.name = fmt::format("{}, busy", name_of(resource)), .values = {}};
  for (const BudgetStep& step : steps) line.values.push_back(step.step.busy(resource));
  return line;
}

std::string count_text(double count) {
  if (count >= 1e9) return fmt::format("{:.3g} billion", 1e-9 * count);
  return count >= 1e6 ? fmt::format("{:.3g} million", 1e-6 * count) : fmt::format("{:.0f}", count);
}

}  // namespace

std::optional<std::string> plan_plot(const PlanSubject& subject) {
  std::vector<BudgetStep> steps = steps_by_host_memory(subject.request, kBudgets);
  std::erase_if(steps, [&](const BudgetStep& step) {
    return subject.drive_bytes && step.nvme_bytes > *subject.drive_bytes;
  });
  if (steps.empty()) return std::nullopt;
  const BudgetStep& enough = enough_memory(steps);
  LineChart chart{
      .title = "One step of " + count_text(subject.parameters) + " parameters over host memory",
      .x_name = "memory.host",
      .y_name = "s"};
  LineChart::Line whole{.name = "the step", .values = {}, .is_main = true};
  for (const BudgetStep& step : steps) {
    chart.places.push_back(static_cast<double>(step.host_bytes));
    chart.place_texts.push_back(format_bytes(step.host_bytes));
    whole.values.push_back(step.step.step_s);
  }
  for (std::size_t i = 0; i < kResourceCount; ++i) {
    LineChart::Line line = busy_line(steps, static_cast<Resource>(i));
    bool is_used = false;
    for (const double value : line.values) is_used |= value > 0;
    if (is_used) chart.lines.push_back(std::move(line));
  }
  chart.lines.push_back(std::move(whole));
  chart.marks.push_back({.at = static_cast<double>(enough.host_bytes),
                         .text = fmt::format("from {} on, more host memory wins less than 1 %",
                                             format_bytes(enough.host_bytes))});
  if (const auto budget = subject.request.config.memory.host_bytes)
    chart.marks.push_back({.at = static_cast<double>(*budget),
                           .text = fmt::format("this config's budget, {}", format_bytes(*budget))});
  return svg_of(chart);
}

}  // namespace sluice
