#include "tools/trace/trace_diff.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include <fmt/format.h>

#include <sluice/error.h>
#include "tools/trace/trace_engine.h"
#include "tools/trace/trace_steps.h"

namespace sluice {
namespace {

constexpr std::size_t kUnitsShown = 10;

// The two-sided 95 % quantile of Student's t: exact to three digits at the listed degrees of
// freedom, and that of the next lower one between them, which errs on the careful side.
double t_quantile(double degrees) {
  constexpr std::pair<double, double> kTable[] = {
      {1, 12.706}, {2, 4.303},  {3, 3.182},  {4, 2.776},  {5, 2.571},  {6, 2.447},
      {7, 2.365},  {8, 2.306},  {9, 2.262},  {10, 2.228}, {12, 2.179}, {15, 2.131},
      {20, 2.086}, {30, 2.042}, {60, 2.000}, {120, 1.980}};
  double quantile = kTable[0].second;
  for (const auto& [from, value] : kTable) {
    if (degrees >= from) quantile = value;
  }
  return quantile;
}

struct Moments {
  double mean = 0;
  double variance_of_mean = 0;
  double count = 0;
};

Moments moments_of(const std::vector<double>& values) {
  Moments moments{.count = static_cast<double>(values.size())};
  for (const double value : values) moments.mean += value / moments.count;
  if (values.size() < 2) return moments;
  double squares = 0;
  for (const double value : values) squares += (value - moments.mean) * (value - moments.mean);
  moments.variance_of_mean = squares / (moments.count - 1) / moments.count;
  return moments;
}

TraceChange change_of(const std::string& name, const std::vector<double>& before,
                      const std::vector<double>& after) {
  const Moments a = moments_of(before), b = moments_of(after);
  TraceChange change{.name = name, .before_ms = a.mean, .after_ms = b.mean};
  if (a.count < 2 || b.count < 2) {
    change.margin_ms = std::numeric_limits<double>::quiet_NaN();
    return change;
  }
  const double variance = a.variance_of_mean + b.variance_of_mean;
  if (variance == 0) return change;
  // Welch and Satterthwaite.
  const double degrees = variance * variance /
                         (a.variance_of_mean * a.variance_of_mean / (a.count - 1) +
                          b.variance_of_mean * b.variance_of_mean / (b.count - 1));
  change.margin_ms = t_quantile(degrees) * std::sqrt(variance);
  return change;
}

// Quantities by name, one value per step.
class Series {
 public:
  explicit Series(const TraceAnalysis& analysis) : engine_(engine_of(analysis.trace())) {
    steps_ = steady_steps(analysis);
    if (steps_.empty())
      throw Error(ErrorCode::kInput,
                  fmt::format("\"{}\" has no step that ended; nothing can be compared",
                              analysis.trace().path));
    for (const TraceRecord& record : analysis.trace().records) {
      if (record.kind == TraceKind::kCompute || record.kind == TraceKind::kWait) add_unit(record);
    }
  }

  std::vector<double> of(const auto& function) const {
    std::vector<double> values;
    for (const StepShare& step : steps_)
      values.push_back(static_cast<double>(function(step)) * 1e-6);
    return values;
  }
  std::vector<double> of_unit(const std::string& name) const {
    const auto found = units_.find(name);
    return found == units_.end() ? std::vector<double>(steps_.size()) : found->second;
  }
  const std::map<std::string, std::vector<double>>& units() const { return units_; }
  const TracedEngine& engine() const { return engine_; }

 private:
  void add_unit(const TraceRecord& record) {
    const std::optional<std::size_t> place = place_of(record, steps_);
    if (!place || record.unit == kTraceNone) return;
    auto& values = units_[engine_.unit_name(record.unit)];
    values.resize(steps_.size());
    values[*place] += static_cast<double>(record.end_ns - record.begin_ns) * 1e-6;
  }

  TracedEngine engine_;
  std::vector<StepShare> steps_;
  std::map<std::string, std::vector<double>> units_;
};

std::vector<TraceSetting> settings_that_differ(const TracedEngine& before,
                                               const TracedEngine& after) {
  const auto value_in = [](const TracedEngine& engine, const std::string& name) {
    const auto found = engine.settings.find(name);
    return found == engine.settings.end() ? std::string("-") : found->second;
  };
  std::set<std::string> names;
  for (const TracedEngine* engine : {&before, &after}) {
    for (const auto& [name, value] : engine->settings) names.insert(name);
  }
  std::vector<TraceSetting> differ;
  for (const std::string& name : names) {
    TraceSetting setting{
        .name = name, .before = value_in(before, name), .after = value_in(after, name)};
    if (setting.before != setting.after) differ.push_back(std::move(setting));
  }
  return differ;
}

std::string settings_text(const TraceDiff& diff) {
  if (!diff.are_settings_known)
    return "settings: unknown, since a trace does not describe its engine\n";
  if (diff.settings.empty()) return "settings: no difference\n";
  std::string text = "settings that differ\n";
  for (const TraceSetting& setting : diff.settings)
    text += fmt::format("  {}: {} -> {}\n", setting.name, setting.before, setting.after);
  return text;
}

std::string line_of(const TraceChange& change) {
  const std::string percent =
      change.before_ms == 0
          ? "-"
          : fmt::format("{:+.1f} %", 100 * change.difference_ms() / change.before_ms);
  // One step alone has no spread.
  const std::string margin =
      std::isnan(change.margin_ms) ? "?" : fmt::format("{:.3f}", change.margin_ms);
  return fmt::format("{:<24}{:>11.3f}{:>11.3f}{:>11.3f} +- {:<9}{:>9}{}\n", change.name,
                     change.before_ms, change.after_ms, change.difference_ms(), margin, percent,
                     change.is_certain() ? "" : "  (may be chance)");
}

}  // namespace

bool TraceChange::is_certain() const {
  return std::abs(difference_ms()) > margin_ms;  // false for NaN
}

bool TraceDiff::is_regression(double percent) const {
  return step.is_certain() && step.difference_ms() > step.before_ms * percent / 100;
}

TraceDiff diff_of(const TraceAnalysis& before, const TraceAnalysis& after) {
  const Series a(before), b(after);
  const auto change = [&](const std::string& name, const auto& function) {
    return change_of(name, a.of(function), b.of(function));
  };
  TraceDiff diff;
  diff.step = change("step", [](const StepShare& step) { return step.total_ns(); });
  diff.parts = {
      change("compute", [](const StepShare& step) { return step.compute_ns; }),
      change("exposed I/O", [](const StepShare& step) { return step.exposed_io_ns; }),
      change("exposed optimizer", [](const StepShare& step) { return step.exposed_optimizer_ns; }),
      change("other", [](const StepShare& step) { return step.other_ns; })};
  for (std::size_t cause = 0; cause < kStallCauses; ++cause) {
    const TraceChange of = change(std::string(name_of(static_cast<StallCause>(cause))),
                                  [&](const StepShare& step) { return step.by_cause[cause]; });
    if (of.before_ms != 0 || of.after_ms != 0) diff.causes.push_back(of);
  }
  std::map<std::string, bool> names;
  for (const Series* series : {&a, &b}) {
    for (const auto& [name, values] : series->units()) names[name] = true;
  }
  for (const auto& [name, is_there] : names)
    diff.units.push_back(change_of(name, a.of_unit(name), b.of_unit(name)));
  std::ranges::stable_sort(diff.units, std::greater(),
                           [](const TraceChange& of) { return std::abs(of.difference_ms()); });
  diff.are_settings_known = a.engine().is_known && b.engine().is_known;
  if (diff.are_settings_known) diff.settings = settings_that_differ(a.engine(), b.engine());
  return diff;
}

std::string text_of(const TraceDiff& diff) {
  std::string text = fmt::format("{:<24}{:>11}{:>11}{:>11}    {:<9}{:>9}\n", "ms per step (mean)",
                                 "before", "after", "change", "95 %", "change");
  text += line_of(diff.step);
  for (const TraceChange& part : diff.parts) text += line_of(part);
  if (!diff.causes.empty()) text += "waits by cause\n";
  for (const TraceChange& cause : diff.causes) text += line_of(cause);
  if (!diff.units.empty()) text += "computation and waits by unit, the largest changes\n";
  for (std::size_t i = 0; i < std::min(diff.units.size(), kUnitsShown); ++i)
    text += line_of(diff.units[i]);
  return text + settings_text(diff);
}

}  // namespace sluice
