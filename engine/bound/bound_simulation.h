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
// The next step begins when the norm of the previous step is known and its last use is computed.
// Under `serial`, it begins when all blocks of the previous step are home.
// A use waits until all of its unit's blocks have their update. Parameter fetches and lanes share
// the parameter slots. So a block that one of them is reading or has in host memory is not read
// again by the other.
// As many slots as the placement allows keep their blocks. Under `eager` and `speculative`, blocks
// of the step's last fetch stay until the update. Blocks updated after the turn stay until the next
// forward.
// A lane holds a block from the start of its reads to the end of its writes. A block whose
// parameters and record are at home in host memory needs no lane.
// The device's work on gradients that wait there takes no time. This work goes through each byte
// once, at the rate of the device's memory, beside computation that is bound by arithmetic. The
// device's updates go through about ten times as many bytes, so they are a resource of their own
// beside computation. These updates run block by block as soon as the norm is known, or under
// `eager` as soon as the unit's gradient is there.
// Leases end in order. So a fetch into the place of a later use does not go past a unit that waits
// at home for its update.
// Parameters at home on the device are ready for a use, or gathered in place, without a copy.
// With memory.unified, so are units in host memory, updates use parameters on the device without
// copies, and a unit's first gradient of a step is computed where it waits, in no slot.
// `serial`: lanes are granted in unit order when the norm is known.
// `deferred`: lanes are granted in unit order as soon as they are free, and Adam waits for the
// norm.
// `eager`: while gradients arrive, lanes are granted in order of arrival, from the last unit down,
// and then in unit order. Adam follows the same orders, and waits for the unit's gradient.
// `speculative`: as `eager` for blocks whose home is storage. The other blocks wait for the norm,
// and no step is redone.
// With a durable store, a commit is due every commit_every-th update. A block at home in memory is
// written after such an update and after all other writes. The block's next update waits for that
// write. The commit begins when every block is on storage. A commit flushes three times, one flush
// after the other. Stores of the next version wait until the commit has begun and, with two copies,
// until it has ended. A commit after more than 4 updates is simulated as a commit after 4 updates,
// and its cost counts once for each real commit.
#pragma once

#include "engine/bound/step_cost.h"

namespace sluice {

// Returns the mean over a number of steps, without the first steps, which fill the pipeline.
StepCost simulate_steps(const StepShape& shape, OverlapPolicy policy);

}  // namespace sluice
