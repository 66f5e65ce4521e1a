// These functions bring the ranks of a run together through their engine. All ranks make each call.
#pragma once

#include <functional>

#include <sluice/engine.h>
#include "tools/cli/output_file.h"

namespace sluice {

// Returns the mean of the values `own` of all ranks.
// Fails with kRanks if a rank is gone.
double mean_over_ranks(Engine& engine, double own);

// Runs `work`, in which ranks do not wait for each other, as an attempt of `failures`. Returns
// whether `work` has succeeded on all ranks.
// Fails with kRanks if a rank is gone.
bool all_ranks(Engine& engine, FirstFailure& failures, const std::function<void()>& work);

// Runs `work` on rank 0, such as the writing of files. Returns when `work` has ended. `work` may
// take longer than ranks wait for each other (sharding.timeout): meanwhile, rank 0 tells the others
// that it is at work. `work` runs on the calling thread, and makes no call of `engine`.
// Fails with what `work` throws, on rank 0 alone. Fails with kRanks if a rank is gone.
void await_first_rank(Engine& engine, const std::function<void()>& work);

}  // namespace sluice
