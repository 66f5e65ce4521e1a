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

// Each returns the exit code (tools/exit_codes.h) and fails with: kInput for a file that cannot be
// read or written, or is no trace; kConfig for an option.
int run_trace_summary(const TraceSummaryOptions& options);

}  // namespace sluice
