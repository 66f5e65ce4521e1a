// Which rank the others wait for: the one that came last to each collective.
//
// Thread rule: pure.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/trace/trace_analysis.h"

namespace sluice {

struct RankLag {
  std::uint32_t rank = 0;
  std::uint64_t last = 0;     // collectives that this rank came to last
  std::uint64_t late_ns = 0;  // by how much later than the one before it, added up
};

struct RankLags {
  std::uint64_t collectives = 0;  // that all of the ranks at hand have a record of
  std::vector<RankLag> ranks;     // in the order of the analyses
};

// Counts the collectives of traced steps, not those of evaluations. A rank whose trace is missing
// does not count.
RankLags rank_lags(const std::vector<TraceAnalysis>& ranks);

}  // namespace sluice
