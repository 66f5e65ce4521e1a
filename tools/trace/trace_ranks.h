// Finds the rank that enters collectives last. The other ranks wait for this rank.
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/trace/trace_analysis.h"

namespace sluice {

struct RankLag {
  std::uint32_t rank = 0;
  std::uint64_t last = 0;  // collectives that this rank entered last
  // The sum of this rank's delays in the collectives that this rank entered last. A delay is the
  // time between the entry of the second-to-last rank and the entry of this rank.
  std::uint64_t late_ns = 0;
};

struct RankLags {
  std::uint64_t collectives = 0;  // collectives that all traced ranks have recorded
  std::vector<RankLag> ranks;     // in the order of the analyses
};

// The function counts the collectives of traced steps, but not the collectives of evaluations.
// Ranks without a trace are ignored.
RankLags rank_lags(const std::vector<TraceAnalysis>& ranks);

}  // namespace sluice
