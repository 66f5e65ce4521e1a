// `sluice trace` reads the files that `train --trace` recorded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct TraceSummaryOptions {
  std::string steps;                 // FIRST-LAST; empty = all
  std::vector<std::string> files;    // one file of each rank
  std::string calibration;           // written by `bench io --json`; empty = none
  std::string bytes_written_rating;  // of all drives together, such as "1200TB"; empty = none
  std::string json_file;             // empty = none; "-" = standard output
};

struct TraceHtmlOptions {
  std::string steps;  // FIRST-LAST; empty = all
  std::vector<std::string> files;
  std::string output;
  std::string calibration;
};

// There are four possible outputs. The command writes an output if the output's file name is not
// empty.
struct TraceExportOptions {
  std::string steps;  // FIRST-LAST; empty = all
  std::vector<std::string> files;
  std::string chrome_file;
  std::string perfetto_file;
  std::string csv_file;
  std::string json_file;
};

struct TraceDiffOptions {
  std::string steps;  // FIRST-LAST; empty = all
  std::string before;
  std::string after;
  double percent = 5;  // exit code 3 if the step has become longer by more than this
  std::string json_file;
  std::string page_file;
};

struct TraceWhatIfOptions {
  std::string steps;  // FIRST-LAST; empty = all
  std::string file;
  std::vector<std::string> settings;
  std::string json_file;
};

// Each function returns the exit code (tools/cli/exit_codes.h).
// Fails with kInput if a file cannot be read or written, or if an input is no trace. Fails with
// kConfig if an option is wrong.
int run_trace_summary(const TraceSummaryOptions& options);
int run_trace_html(const TraceHtmlOptions& options);
int run_trace_export(const TraceExportOptions& options);
int run_trace_diff(const TraceDiffOptions& options);
int run_trace_whatif(const TraceWhatIfOptions& options);

}  // namespace sluice
