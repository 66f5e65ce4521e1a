// Which rank the others wait for: of each collective, the one that came to it last.
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

// Of the collectives of traced steps: not of evaluations. A rank whose trace is missing is not
// there to be waited for.
RankLags rank_lags(const std::vector<TraceAnalysis>& ranks);

}  // namespace sluice
