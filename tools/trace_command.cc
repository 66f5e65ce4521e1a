#include "tools/trace_command.h"

#include <fmt/format.h>

#include "base/units.h"
#include "tools/exit_codes.h"
#include "tools/plan_rates.h"
#include "tools/trace_summary.h"

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

}  // namespace

int run_trace_summary(const TraceSummaryOptions& options) {
  const std::vector<TraceFile> files = read_traces(options.files);
  const std::uint64_t rating =
      options.bytes_written_rating.empty() ? 0 : parse_size(options.bytes_written_rating);
  fmt::print("{}", summary_of(analyse(files), {.peaks = peaks_of(options.calibration),
                                               .bytes_written_rating = rating}));
  return kExitOk;
}

}  // namespace sluice
