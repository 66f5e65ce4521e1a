// The functions measure the offsets between the clocks of ranks on different hosts. With these
// offsets, traces of several ranks can be shown side by side. Each offset is measured by exchanges
// between the ranks. An exchange ends on a rank only after the exchange has begun on all ranks. So
// each exchange gives a lower and an upper limit of the offset, even if messages are slow in one
// direction. A later drift of the clocks is not tracked.
//
// Thread rule: the application's thread makes the calls. All ranks make each call at the same
// point.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "engine/ranks/ranks.h"

namespace sluice {

// The times of one rank just before and just after one exchange.
struct ExchangeTimes {
  std::uint64_t before_ns = 0;
  std::uint64_t after_ns = 0;
};

// A rank's steady clock is ahead of rank 0's clock by offset_ns, plus or minus error_ns.
struct ClockOffset {
  std::int64_t offset_ns = 0;
  std::uint64_t error_ns = 0;
};

// The function is pure. Requires: `own` and `root` list the same exchanges in the same order, and
// are not empty.
ClockOffset clock_offset(std::span<const ExchangeTimes> own, std::span<const ExchangeTimes> root);

// Whether any rank writes a trace.
// Fails with kRanks if a rank is gone.
bool any_rank_traces(Ranks& ranks);
// Returns the section "clock" of this rank's trace.
// Fails with kRanks if a rank is gone.
std::string describe_clock(Ranks& ranks);

}  // namespace sluice
