#include "tools/trace_command.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <functional>

#include <fmt/format.h>

#include "base/error.h"
#include "base/units.h"
#include "tools/exit_codes.h"
#include "tools/plan_rates.h"
#include "tools/trace_diff.h"
#include "tools/trace_export.h"
#include "tools/trace_html.h"
#include "tools/trace_summary.h"
#include "tools/trace_whatif.h"

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
  const Rates rates = plan_rates(options, {}).rates;
  return {.read_bytes_per_second = rates.read_bytes_per_second,
          .write_bytes_per_second = rates.write_bytes_per_second};
}

// A new file, readable by its owner alone: it names tensors and paths. `write` fills it.
void write_output(const std::string& path, const std::function<void(std::FILE*)>& write) {
  const auto fail = [&] {
    throw Error(ErrorCode::kInput, fmt::format("cannot write \"{}\": {}; choose another place",
                                               path, errno_text(errno)));
  };
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (descriptor < 0) fail();
  std::FILE* const file = ::fdopen(descriptor, "w");
  write(file);
  const bool is_bad = std::ferror(file) != 0;
  if (std::fclose(file) != 0 || is_bad) fail();
}

}  // namespace

int run_trace_html(const TraceHtmlOptions& options) {
  const std::vector<TraceFile> files = read_traces(options.files);
  const std::string page = html_of(analyse(files), peaks_of(options.calibration));
  write_output(options.output, [&](std::FILE* file) { fmt::print(file, "{}", page); });
  return kExitOk;
}

int run_trace_export(const TraceExportOptions& options) {
  if (options.chrome_file.empty() && options.csv_file.empty() && options.json_file.empty())
    throw Error(ErrorCode::kConfig, "trace export: name a file with --chrome, --csv or --json");
  const std::vector<TraceFile> files = read_traces(options.files);
  const std::vector<TraceAnalysis> ranks = analyse(files);
  const auto write = [&](const std::string& path, const auto& function) {
    if (!path.empty()) write_output(path, [&](std::FILE* file) { function(file, ranks); });
  };
  write(options.chrome_file, write_chrome);
  write(options.csv_file,
        [](std::FILE* file, const std::vector<TraceAnalysis>& of) { write_csv(file, of); });
  write(options.json_file,
        [](std::FILE* file, const std::vector<TraceAnalysis>& of) { write_json(file, of); });
  return kExitOk;
}

int run_trace_diff(const TraceDiffOptions& options) {
  const TraceFile before = read_trace(options.before), after = read_trace(options.after);
  const TraceDiff diff = diff_of(TraceAnalysis(before), TraceAnalysis(after));
  fmt::print("{}", text_of(diff));
  if (!diff.is_regression(options.percent)) return kExitOk;
  fmt::print("regression: the step is longer by more than {:g} %\n", options.percent);
  return kExitRegression;
}

int run_trace_whatif(const TraceWhatIfOptions& options) {
  const TraceFile file = read_trace(options.file);
  fmt::print("{}", text_of(what_if(TraceAnalysis(file), options.settings)));
  return kExitOk;
}

int run_trace_summary(const TraceSummaryOptions& options) {
  const std::vector<TraceFile> files = read_traces(options.files);
  const std::uint64_t rating =
      options.bytes_written_rating.empty() ? 0 : parse_size(options.bytes_written_rating);
  fmt::print("{}", summary_of(analyse(files), {.peaks = peaks_of(options.calibration),
                                               .bytes_written_rating = rating}));
  return kExitOk;
}

}  // namespace sluice
