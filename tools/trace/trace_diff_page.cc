#include "tools/trace/trace_diff_page.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "tools/report/svg_chart.h"

namespace sluice {
namespace {

constexpr std::size_t kUnitsDrawn = 20;

constexpr const char* kDiffPage = R"(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Sluice trace diff</title>
<style>
body {{ background: #fff; color: #1a1c20; font: 15px/1.5 system-ui, sans-serif; }}
body {{ margin: 0 auto; max-width: 1100px; padding: 12px 16px 40px; }}
h1 {{ font-size: 20px; }} h2 {{ font-size: 16px; margin: 24px 0 6px; }}
svg {{ max-width: 100%; height: auto; }} .soft {{ color: #565b63; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; }}
th, td {{ border-bottom: 1px solid #c4c8ce; padding: 3px 10px; text-align: right; }}
th, td {{ white-space: nowrap; }} td {{ font-variant-numeric: tabular-nums; }}
th:first-child, td:first-child {{ text-align: left; }}
</style>
</head>
<body>
<h1>Sluice trace diff</h1>
<p>{}</p>
<p class="soft">Before: {}<br>After: {}<br>Means per step, without the first step. A change is
certain where the 95 % confidence interval (Welch's t) lies on one side of 0.</p>
{}</body>
</html>
)";

std::string percent_text(const TraceChange& change) {
  return change.before_ms == 0
             ? "-"
             : fmt::format("{:+.1f} %", 100 * change.difference_ms() / change.before_ms);
}

std::string verdict_text(const TraceChange& step) {
  const std::string change = fmt::format("The mean step went from {:.3f} ms to {:.3f} ms ({})",
                                         step.before_ms, step.after_ms, percent_text(step));
  return change + (step.is_certain() ? "; that is not chance." : "; that may be chance.");
}

std::string row_text(const TraceChange& change) {
  return fmt::format(
      "<tr><td>{}</td><td>{:.3f}</td><td>{:.3f}</td><td>{:+.3f}</td><td>{}</td><td>{}</td>"
      "<td>{}</td></tr>\n",
      escaped_markup(change.name), change.before_ms, change.after_ms, change.difference_ms(),
      std::isnan(change.margin_ms) ? "?" : fmt::format("{:.3f}", change.margin_ms),
      percent_text(change), change.is_certain() ? "certain" : "may be chance");
}

// Bars of the first `drawn` changes, and all of them as a table.
std::string part_of(std::string_view heading, const std::vector<TraceChange>& changes,
                    std::size_t drawn) {
  if (changes.empty()) return {};
  BarChart chart{.title = std::string(heading),
                 .unit = "ms per step",
                 .series = {"before", "after"},
                 .rows = {}};
  for (std::size_t i = 0; i < std::min(drawn, changes.size()); ++i)
    chart.rows.push_back({.label = changes[i].name,
                          .bars = {ChartBar{.value = changes[i].before_ms},
                                   ChartBar{.value = changes[i].after_ms}}});
  std::string text = fmt::format("<h2>{}</h2>\n", escaped_markup(heading)) + svg_of(chart);
  text +=
      "<div class=\"wide\"><table><thead><tr><th scope=\"col\">ms per step</th><th "
      "scope=\"col\">before</th><th scope=\"col\">after</th><th scope=\"col\">change</th><th "
      "scope=\"col\">&plusmn; 95 %</th><th scope=\"col\">change</th><th "
      "scope=\"col\"></th></tr></thead>\n<tbody>\n";
  for (const TraceChange& change : changes) text += row_text(change);
  return text + "</tbody></table></div>\n";
}

std::string settings_part(const TraceDiff& diff) {
  if (!diff.are_settings_known) return {};
  std::string text = "<h2>Settings that differ</h2>\n";
  if (diff.settings.empty()) return text + "<p>None.</p>\n";
  text +=
      "<div class=\"wide\"><table><thead><tr><th scope=\"col\">setting</th><th "
      "scope=\"col\">before</th><th scope=\"col\">after</th></tr></thead>\n<tbody>\n";
  for (const TraceSetting& setting : diff.settings)
    text +=
        fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td></tr>\n", escaped_markup(setting.name),
                    escaped_markup(setting.before), escaped_markup(setting.after));
  return text + "</tbody></table></div>\n";
}

}  // namespace

std::string diff_page(const TraceDiff& diff, const std::string& before, const std::string& after) {
  std::vector<TraceChange> parts{diff.step};
  parts.insert(parts.end(), diff.parts.begin(), diff.parts.end());
  const std::string body =
      part_of("The step and its parts", parts, parts.size()) + settings_part(diff) +
      part_of("Waits by cause", diff.causes, diff.causes.size()) +
      part_of("Computation and waits by unit, the largest changes first", diff.units, kUnitsDrawn);
  return fmt::format(kDiffPage, escaped_markup(verdict_text(diff.step)), escaped_markup(before),
                     escaped_markup(after), body);
}

}  // namespace sluice
