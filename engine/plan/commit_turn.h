// The moment in a step at which the commit of the step before may begin. A flush makes a drive
// write out its cache, and reads wait meanwhile. So the flush comes when the step needs the drives
// least: after the fetches, and before the stores of the next version. Until then, a drive's cache
// empties beside computation.
//
// Thread rule: pure.
#pragma once

#include <cstdint>

#include <sluice/config.h>
#include "engine/plan/schedule.h"

namespace sluice {

// Returns how many uses of the step, from the first on, get their units before the commit begins:
// those of forward where updates begin in backward (`eager`, `speculative`), and under `deferred`
// those up to the end of the first backward pass. With many micro-batches, a commit would wait too
// long for the step's end. Under `serial` it is 0: there the whole state is stored before the next
// step begins, and the commit begins at once.
std::uint32_t uses_before_commit(const Schedule& schedule, OverlapPolicy policy);

// Whether the commit may wait at all. If the flushes take more than a third of a step even with an
// empty cache, the rest of the step is too short for them, and the stores of the next version would
// wait. Such a commit begins as soon as it can. `flush_s` is the time of one flush that finds
// the cache empty.
bool commit_may_wait(double flush_s, double step_s);

}  // namespace sluice
