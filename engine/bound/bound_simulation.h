// The ideal schedule of a step under an overlap policy, simulated block by block until it repeats.
// The schedule has the engine's means: parameter slots, window places, gradient slots and lanes.
// Computation, fetches and copies follow the schedule's order, and blocks get lanes strictly in
// order. Within these limits the schedule is ideal: only the stated rates take time, and nothing
// waits needlessly.
//
// The rules:
//
// A storage line serves parameter fetches first, then reads of state, then writes. The CPU serves
// norms and additions before Adam.
// The next step begins when the norm of the previous step is known and the last use of the previous
// step is computed. Under `serial`, the next step begins when all blocks of the previous step are
// home. The announced uses have their own fetches and window places, and their fetches go first.
// Such a fetch begins once computation has come to the announcement.
// Under optimizer.untouched "skip", units without a use in backward have no update.
// A use waits until all of its unit's blocks have their update. Parameter fetches and lanes share
// the parameter slots. So if a fetch or a lane is reading a block or has the block in host memory,
// the other one does not read the block again.
// Some slots keep their blocks; the placement limits how many. Under `eager` and `speculative`,
// blocks of the step's last fetch stay until the update. If a block is updated after the turn from
// backward to forward, the block stays until the next forward.
// A lane holds a block from the start of its reads to the end of its writes. A block whose
// parameters and record are at home in host memory needs no lane.
// The device's work on gradients that wait on the device takes no time. This work goes through each
// byte once, at the rate of the device's memory, beside computation that is bound by arithmetic.
// The device's updates go through about ten times as many bytes, so they are a separate resource
// beside computation. These updates run block by block as soon as the norm is known, or under
// `eager` as soon as the unit's gradient is there.
// Leases end in order. So while a unit waits at home for its update, no fetch overwrites the place
// of a later use.
// A use of parameters at home on the device needs no copy. The parameters are already in place, or
// are gathered in place.
// With memory.unified, units in host memory are ready without a copy, too, and updates use
// parameters on the device without copies. A unit's first gradient of a step is then computed
// directly in the place where it waits, without a slot.
// `serial`: lanes are granted in unit order when the norm is known.
// `deferred`: lanes are granted in unit order as soon as they are free, and Adam waits for the
// norm.
// `eager`: while gradients arrive, lanes are granted in order of arrival, from the last unit to the
// first. Afterwards, lanes are granted in unit order. Adam follows the same orders, and waits for
// the unit's gradient. `speculative`: the rules of `eager` hold for blocks whose home is storage.
// The other blocks wait for the norm, and no step is redone.
// With a durable store, a commit is due every commit_every-th update. A block at home in memory is
// written after such an update and after all other writes. The block's next update waits for that
// write. The commit begins when every block is on storage. If flushes are short, the commit also
// waits until the next step has fetched its units (engine/plan/commit_turn.h). Under `serial` and
// with several ranks, the commit does not wait for these fetches. A commit flushes three times, one
// flush after the other. A store of the next version waits until the commit has begun. With two
// copies, these stores wait until the commit has ended. A commit after more than 4 updates is
// simulated as a commit after 4 updates, and its cost counts once for each real commit.
#pragma once

#include "engine/bound/step_cost.h"

namespace sluice {

// Returns the mean over several steps. The first steps, which fill the pipeline, are left out.
StepCost simulate_steps(const StepShape& shape, OverlapPolicy policy);

// The same for a step count from commit to commit that is simulated as it is. A simulation ends
// early when a step begins in the same state as an earlier one.
StepCost simulate_whole_commits(const StepShape& shape, OverlapPolicy policy);

}  // namespace sluice
