#include "tools/commands/bench_plots.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/units.h>
#include "tools/report/svg_chart.h"

namespace sluice {
namespace {

ChartBar giga_bar(const Spread& spread) {
  return {.value = spread.median, .low = spread.low, .high = spread.high};
}

ChartBar seconds_bar(const Summary& summary) {
  return {.value = summary.median, .low = summary.low, .high = summary.high};
}

}  // namespace

std::string io_plot(std::span<const IoSeries> series, const std::vector<std::string>& paths) {
  BarChart chart{.title = "Drive rates by pattern, request and requests in flight",
                 .unit = "GB/s",
                 .series = {paths.size() == 1 ? paths.front() : "all paths"},
                 .rows = {}};
  if (paths.size() > 1) chart.series.insert(chart.series.end(), paths.begin(), paths.end());
  for (const IoSeries& one : series) {
    const std::string label =
        fmt::format("{} {}, {}", name_of(one.io_case.pattern),
                    format_bytes(one.io_case.request_bytes), one.io_case.depth);
    auto row = std::ranges::find(chart.rows, label, &BarChart::Row::label);
    if (row == chart.rows.end())
      row = chart.rows.insert(row, {.label = label, .bars = {chart.series.size(), std::nullopt}});
    const auto [low, high] = std::ranges::minmax(one.rates);
    row->bars[one.io_case.drive ? 1 + *one.io_case.drive : 0] =
        ChartBar{.value = 1e-9 * one.rate(), .low = 1e-9 * low, .high = 1e-9 * high};
  }
  return svg_of(chart);
}

std::string adam_plot(std::span<const BenchResult> results) {
  BarChart chart{.title = "The CPU update against this machine's memory",
                 .unit = "GB/s",
                 .series = {"update", "the same streams without arithmetic", "memcpy", "triad"},
                 .rows = {}};
  for (const BenchResult& result : results)
    chart.rows.push_back(
        {.label = fmt::format("{}, {} {}", result.state.name, result.threads,
                              result.threads == 1 ? "thread" : "threads"),
         .bars = {giga_bar(result.update_gb_per_s), giga_bar(result.limit_gb_per_s),
                  giga_bar(result.memcpy_gb_per_s), giga_bar(result.triad_gb_per_s)}});
  return svg_of(chart);
}

std::string step_plot(std::span<const RegimeResult> regimes) {
  BarChart chart{.title = "Training steps against their limits",
                 .unit = "s per step",
                 .series = {"measured", "T_bound", "T_min"},
                 .rows = {}};
  for (const RegimeResult& regime : regimes) {
    for (const PolicyResult& policy : regime.policies) {
      BarChart::Row row{.label = fmt::format("{}, {}{}", regime.name, name_of(policy.policy),
                                             policy.is_bare ? ", bare" : ""),
                        .bars = {3, std::nullopt}};
      if (!policy.steps.empty())
        row.bars = {seconds_bar(policy.step_s()), ChartBar{.value = policy.bound.step_s},
                    ChartBar{.value = regime.least.step_s}};
      chart.rows.push_back(std::move(row));
    }
  }
  return svg_of(chart);
}

std::string gpu_plot(const nlohmann::ordered_json& document) {
  BarChart chart{.title = "Training steps on " + document.value("gpu", std::string("the GPU")),
                 .unit = "s per step",
                 .series = {"measured", "computation alone", "T_min"},
                 .rows = {}};
  for (const auto& entry : document.at("training")) {
    BarChart::Row row{.label = fmt::format("{}, {}", entry.at("shape").get<std::string>(),
                                           entry.at("place").get<std::string>()),
                      .bars = {3, std::nullopt}};
    if (!entry.contains("left_out")) {
      const auto& step = entry.at("step_s");
      row.bars = {
          ChartBar{.value = step.at("median"), .low = step.at("least"), .high = step.at("most")},
          ChartBar{.value = entry.at("compute_step_s")}, ChartBar{.value = entry.at("t_min_s")}};
    }
    chart.rows.push_back(std::move(row));
  }
  return svg_of(chart);
}

std::string matrix_plot(const nlohmann::ordered_json& document) {
  BarChart chart{.title = "Steps by ZeRO stage and offload, beside the plan",
                 .unit = "s per step",
                 .series = {"measured", "planned"},
                 .rows = {}};
  for (const auto& cell : document.at("cells")) {
    BarChart::Row row{.label = fmt::format("stage {}, {}", cell.at("stage").get<int>(),
                                           cell.at("offload").get<std::string>()),
                      .bars = {2, std::nullopt}};
    if (cell.contains("measured")) {
      const auto& measured = cell.at("measured");
      const auto [low, high] =
          std::ranges::minmax(measured.at("steps_s").get<std::vector<double>>());
      row.bars = {ChartBar{.value = measured.at("step_s"), .low = low, .high = high},
                  ChartBar{.value = cell.at("planned").at("step_s")}};
    }
    chart.rows.push_back(std::move(row));
  }
  return svg_of(chart);
}

}  // namespace sluice
