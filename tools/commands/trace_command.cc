#include "tools/commands/trace_command.h"

#include <charconv>
#include <optional>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "tools/cli/exit_codes.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/report/plan_rates.h"
#include "tools/trace/trace_diff.h"
#include "tools/trace/trace_diff_page.h"
#include "tools/trace/trace_export.h"
#include "tools/trace/trace_html.h"
#include "tools/trace/trace_json.h"
#include "tools/trace/trace_perfetto.h"
#include "tools/trace/trace_summary.h"
#include "tools/trace/trace_whatif.h"

namespace sluice {
namespace {

std::vector<TraceAnalysis> analyse(const std::vector<TraceFile>& files) {
  std::vector<TraceAnalysis> ranks;
  ranks.reserve(files.size());
  for (const TraceFile& file : files) ranks.emplace_back(file);
  return ranks;
}

PeakRates peaks_of(const std::string& calibration) {
  if (calibration.empty()) return {};
  PlanRateOptions options;
  options.io_file = calibration;
  options.is_unscaled = true;
  const Rates rates = plan_rates(options, {}).rates;
  return {.read_bytes_per_second = rates.read_bytes_per_second,
          .write_bytes_per_second = rates.write_bytes_per_second,
          .drives = drive_rates(calibration)};
}

// "100-120", or one step.
TraceSteps steps_of(const std::string& text) {
  if (text.empty()) return {};
  TraceSteps steps;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, steps.first);
  auto last = first;
  steps.last = steps.first;
  if (first.ec == std::errc{} && first.ptr != end && *first.ptr == '-')
    last = std::from_chars(first.ptr + 1, end, steps.last);
  if (last.ec != std::errc{} || last.ptr != end || steps.first == 0 || steps.last < steps.first)
    throw Error(ErrorCode::kConfig,
                fmt::format("--steps \"{}\" is neither a step nor a range such as 100-120; steps "
                            "count from 1",
                            text));
  return steps;
}

void add_inputs(OutputFiles& outputs, const std::vector<std::string>& files,
                const std::string& calibration = {}) {
  for (const std::string& file : files) outputs.add_input("the trace", file);
  outputs.add_input("--io", calibration);
}

}  // namespace

int run_trace_html(const TraceHtmlOptions& options) {
  OutputFiles outputs;
  add_inputs(outputs, options.files, options.calibration);
  OutputFile& page = outputs.add("--output", options.output, OutputMode::kPrivate);
  outputs.check();
  const TraceSteps steps = steps_of(options.steps);
  Progress progress("reading the trace");
  const std::vector<TraceFile> files = read_traces(options.files, steps);
  progress.set("drawing the page");
  write_whole(page, html_of(analyse(files), peaks_of(options.calibration)));
  return kExitOk;
}

int run_trace_export(const TraceExportOptions& options) {
  if (options.chrome_file.empty() && options.perfetto_file.empty() && options.csv_file.empty() &&
      options.json_file.empty())
    throw Error(ErrorCode::kConfig,
                "trace export: name a file with --perfetto, --chrome, --csv or --json");
  OutputFiles outputs;
  add_inputs(outputs, options.files);
  OutputFile& chrome = outputs.add("--chrome", options.chrome_file, OutputMode::kPrivate);
  OutputFile& perfetto = outputs.add("--perfetto", options.perfetto_file, OutputMode::kPrivate);
  OutputFile& csv = outputs.add("--csv", options.csv_file, OutputMode::kPrivate);
  OutputFile& json = outputs.add("--json", options.json_file, OutputMode::kPrivate);
  outputs.check();
  const TraceSteps steps = steps_of(options.steps);
  Progress progress("reading the trace");
  const std::vector<TraceFile> files = read_traces(options.files, steps);
  const std::vector<TraceAnalysis> ranks = analyse(files);
  progress.set("writing the records");
  FirstFailure failures;
  const auto write = [&](OutputFile& output, const auto& function) {
    failures.attempt([&] {
      if (output.is_wanted()) function(output, ranks);
      output.commit();
    });
  };
  write(chrome, write_chrome);
  write(perfetto, write_perfetto);
  write(csv, [](OutputFile& file, const std::vector<TraceAnalysis>& of) { write_csv(file, of); });
  write(json, [](OutputFile& file, const std::vector<TraceAnalysis>& of) { write_json(file, of); });
  failures.rethrow();
  return kExitOk;
}

int run_trace_diff(const TraceDiffOptions& options) {
  OutputFiles outputs;
  add_inputs(outputs, {options.before, options.after});
  OutputFile& json = outputs.add("--json", options.json_file, OutputMode::kPrivate);
  OutputFile& page = outputs.add("--html", options.page_file, OutputMode::kPrivate);
  outputs.check();
  const TraceSteps steps = steps_of(options.steps);
  const TraceDiff diff = with_progress("reading the traces", [&] {
    const TraceFile before = read_trace(options.before, steps);
    const TraceFile after = read_trace(options.after, steps);
    return diff_of(TraceAnalysis(before), TraceAnalysis(after));
  });
  say("{}", text_of(diff));
  if (json.is_wanted()) write_whole(json, diff_json(diff, options.percent));
  if (page.is_wanted()) write_whole(page, diff_page(diff, options.before, options.after));
  if (!diff.is_regression(options.percent)) return kExitOk;
  say("regression: the step is longer by more than {:g} %\n", options.percent);
  return kExitRegression;
}

int run_trace_whatif(const TraceWhatIfOptions& options) {
  OutputFiles outputs;
  add_inputs(outputs, {options.file});
  OutputFile& json = outputs.add("--json", options.json_file, OutputMode::kPrivate);
  outputs.check();
  const TraceSteps steps = steps_of(options.steps);
  const WhatIf answer = with_progress("reading the trace", [&] {
    const TraceFile file = read_trace(options.file, steps);
    return what_if(TraceAnalysis(file), options.settings);
  });
  say("{}", text_of(answer));
  if (json.is_wanted()) write_whole(json, whatif_json(answer));
  return kExitOk;
}

int run_trace_summary(const TraceSummaryOptions& options) {
  OutputFiles outputs;
  add_inputs(outputs, options.files, options.calibration);
  OutputFile& json = outputs.add("--json", options.json_file, OutputMode::kPrivate);
  outputs.check();
  const TraceSteps steps = steps_of(options.steps);
  const std::uint64_t rating =
      options.bytes_written_rating.empty() ? 0 : parse_size(options.bytes_written_rating);
  const SummaryOptions shown = {.peaks = peaks_of(options.calibration),
                                .bytes_written_rating = rating};
  std::optional<Progress> progress(std::in_place, "reading the trace");
  const std::vector<TraceFile> files = read_traces(options.files, steps);
  const std::vector<TraceAnalysis> ranks = analyse(files);
  const std::string summary = summary_of(ranks, shown);
  const std::string figures = json.is_wanted() ? summary_json(ranks, shown) : std::string();
  progress.reset();
  say("{}", summary);
  if (json.is_wanted()) write_whole(json, figures);
  return kExitOk;
}

}  // namespace sluice
