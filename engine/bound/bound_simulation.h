// The ideal schedule of a step under an overlap policy, simulated block by block until it repeats.
// It uses the engine's means: parameter slots, window places, gradient slots and lanes,
// computation in schedule order, fetches and their copies in schedule order, state granted lanes
// strictly in order. Within that it is ideal: only the stated rates take time, and nothing waits
// needlessly.
//
// The rules:
// - A storage line serves parameter fetches first, then reads of state, then writes; the CPU norms
//   and additions before Adam.
// - The next step begins when the norm of the one before is known; under `serial`, when all of its
//   blocks are home.
// - A use waits until all of its unit's blocks have their update. Fetches and lanes share parameter
//   slots: neither reads a block that the other has in host memory or on its way. As many slots as
//   the placement allows keep the blocks of the step's last fetch until the update (`eager`,
//   `speculative`), and blocks updated after the turn until the next forward.
// - A lane holds a block from the start of its reads to the end of its writes. A block whose
//   parameters and record are at home in host memory needs none.
// - The device's work on gradients that wait there takes no time: it goes through each byte once,
//   at the rate of its own memory, beside computation that is bound by arithmetic. The device's
//   updates go through about ten times as many bytes, so they are a resource of their own beside
//   computation: one block after the other, as soon as the norm is known, or under `eager` as soon
//   as the unit's gradient is there.
// - Parameters at home on the device are ready for a use, or gathered in place, without a copy.
// - `serial`: lanes are granted when the norm is known, in unit order. `deferred`: in unit order as
//   soon as lanes are free; Adam waits for the norm. `eager`: in order of arrival, from the last
//   unit down, while gradients arrive, then in unit order. Adam follows the same orders, and waits
//   for the unit's gradient.
//   `speculative`: as `eager` for blocks whose home is storage, the others wait for the norm; no
//   step is redone.
#pragma once

#include "engine/bound/step_cost.h"

namespace sluice {

// The mean over a number of steps, without those that fill the pipeline.
StepCost simulate_steps(const StepShape& shape, OverlapPolicy policy);

}  // namespace sluice
