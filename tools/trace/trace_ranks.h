// Finds the rank for which the other ranks wait. It is the rank that enters collectives last.
//
// Thread rule: pure.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/trace/trace_analysis.h"

namespace sluice {

struct RankLag {
  std::uint32_t rank = 0;
  std::uint64_t last = 0;     // collectives that this rank entered last
  std::uint64_t late_ns = 0;  // the sum of its delays behind the rank before
};

struct RankLags {
  std::uint64_t collectives = 0;  // collectives that every traced rank has a record of
  std::vector<RankLag> ranks;     // in the order of the analyses
};

// The function counts the collectives of traced steps, but not those of evaluations. Ranks without
// a trace are ignored.
RankLags rank_lags(const std::vector<TraceAnalysis>& ranks);

}  // namespace sluice
