// The moment in a step at which the previous step's commit may begin. A flush makes a drive write
// out its cache. Reads have to wait until the flush ends. So the flush comes when the step needs
// the drives least, which is after the fetches and before the stores of the next version. Until
// then, a drive's cache empties beside computation.
//
// Thread rule: pure.
#pragma once

#include <cstdint>

#include <sluice/config.h>
#include "engine/plan/schedule.h"

namespace sluice {

// Returns a number of uses, counted from the start of the step. The commit begins when these uses
// have their units. Under `eager` and `speculative`, updates begin in backward. The commit then
// waits for the uses of forward. Under `deferred`, the commit waits for the uses up to the end of
// the first backward pass. With many micro-batches, waiting for the step's end would delay the
// commit for too long. Under `serial`, the result is 0. Under `serial`, the whole state is stored
// before the next step begins, so the commit begins at once.
std::uint32_t uses_before_commit(const Schedule& schedule, OverlapPolicy policy);

// Whether a commit may wait for fetches at all. If the flushes take more than a third of a step
// even with an empty cache, the rest of the step is too short for the flushes. The stores of the
// next version would then wait. Such a commit begins as soon as it can. `flush_s` is the time of
// one flush that finds the cache empty.
bool commit_may_wait(double flush_s, double step_s);

}  // namespace sluice
