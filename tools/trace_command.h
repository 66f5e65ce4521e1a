// `sluice trace`: reads what `train --trace` recorded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct TraceSummaryOptions {
  std::vector<std::string> files;    // one of each rank
  std::string calibration;           // of bench io --json; empty = none
  std::string bytes_written_rating;  // of the drives together: "1200TB"; empty = not asked
};

struct TraceHtmlOptions {
  std::vector<std::string> files;
  std::string output;
  std::string calibration;
};

// Each file that is named is written.
struct TraceExportOptions {
  std::vector<std::string> files;
  std::string chrome_file;
  std::string csv_file;
  std::string json_file;
};

// Each returns the exit code (tools/exit_codes.h) and fails with: kInput for a file that cannot be
// read or written, or is no trace; kConfig for an option.
int run_trace_summary(const TraceSummaryOptions& options);
int run_trace_html(const TraceHtmlOptions& options);
int run_trace_export(const TraceExportOptions& options);

}  // namespace sluice
