// The moment in a step at which the previous step's commit may begin. A flush makes a drive write
// out its cache. Read requests have to wait until the flush ends. So the flush comes when the step
// needs the drives least: after the fetches, and before the stores of the next version. Until the
// flush comes, a drive can empty its cache while the device computes.
//
// Thread rule: the functions are pure.
#pragma once

#include <cstdint>

#include <sluice/config.h>
#include "engine/plan/schedule.h"

namespace sluice {

// Returns a number of uses, counted from the start of the step. The commit begins when the units of
// these uses have been fetched. With the policies `eager` and `speculative`, updates begin in the
// backward pass. So the commit waits only for the uses of the forward pass. With the policy
// `deferred`, the commit waits for the uses up to the end of the first backward pass. With many
// micro-batches, a commit that waited for the end of the step would come too late. With the policy
// `serial`, the result is 0, and the commit begins at once. The reason is that the whole state is
// stored before the next step begins.
std::uint32_t uses_before_commit(const Schedule& schedule, OverlapPolicy policy);

// Whether a commit may wait for fetches at all. The result is false if the flushes take more than a
// third of a step even with an empty cache. After its fetches, such a step has too little time for
// the flushes. The flushes would delay the writes of the next version. A commit that is not allowed
// to wait begins as soon as possible. `flush_s` is the duration of one flush with an empty cache.
bool commit_may_wait(double flush_s, double step_s);

}  // namespace sluice
