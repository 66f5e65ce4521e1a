// Simulates the ideal schedule of a step under an overlap policy. The simulation goes block by
// block, and ends when the schedule repeats. The schedule uses the same resources as the engine:
// parameter slots, window places, gradient slots and lanes. Computation, fetches and copies follow
// the schedule's order, and blocks get lanes strictly in order. Within these limits, the schedule
// is ideal. Work without a rate takes no time. No work waits longer than necessary.
//
// The rules:
//
// Storage serves parameter fetches first, then reads of state, then writes. The CPU gives norms and
// additions priority over Adam.
// The next step begins when the norm of the previous step is known and the last use of the previous
// step has been computed. Under `serial`, the next step begins when all blocks of the previous step
// are at home. A use that a step announces is fetched apart from the other uses, and has a place of
// its own in the window. The fetches of announced uses go first. Such a fetch begins when
// computation has reached the announcement.
// Under optimizer.untouched "skip", units that the backward pass does not use are not updated.
// A use of a unit waits until all blocks of the unit have been updated. Parameter fetches and lanes
// share the parameter slots. If a fetch is reading a block or has the block in host memory, a lane
// does not read the block again. A fetch does not read a block that a lane is reading or has in
// host memory.
// Some slots keep their blocks after use. The placement limits the number of these slots. Under
// `eager` and `speculative`, blocks of the step's last fetch stay in their slots until the update.
// A block may be updated after the change from the backward pass to the forward pass. Such a block
// stays in its slot until the next forward pass.
// A lane holds a block from the start of the block's reads to the end of the block's writes. A
// block whose parameters and record are at home in host memory needs no lane.
// Some gradients wait on the device. In the simulation, the device's work on these gradients takes
// no time. This work reads each byte once, at the rate of the device's memory. Computation can run
// at the same time as this work, because the speed of computation depends on arithmetic and not on
// memory. An update on the device moves about ten times as many bytes as this work on gradients. So
// the simulation has one resource for these updates, and another resource for computation. The
// device updates one block after another as soon as the norm is known. Under `eager`, the device
// updates a unit as soon as the unit's gradient has arrived.
// Under optimizer.update_on "device", a block that is ready for its update takes a place on the
// device. The block is copied to the device, updated there, and copied back to the host. The block
// then leaves the place. The copies of parameter fetches go before all other copies to the device.
// The copies of gradients go before all other copies to the host.
// Leases end in the order of the uses. Some units are leased directly in their home. A use of such
// a unit may wait for the unit's update. During this wait, no fetch overwrites the place that a
// later use has in the window.
// A use needs no copy if its parameters have their home on the device. The parameters are already
// in place, or are gathered in place.
// With memory.unified, units in host memory also need no copy. Updates use the parameters on the
// device directly, without a copy. The first gradient of a unit in a step is then computed directly
// in the place where the gradient waits. This gradient needs no slot.
// `serial`: lanes are granted in unit order when the norm is known.
// `deferred`: lanes are granted in unit order as soon as lanes are free, and Adam waits for the
// norm.
// `eager`: while gradients arrive, lanes are granted in order of arrival, from the last unit to the
// first. Afterwards, lanes are granted in unit order. Adam updates the blocks in the order in which
// the blocks got lanes. For each block, Adam waits for the gradient of the block's unit.
// `speculative`: the rules of `eager` hold for blocks whose home is storage. All other blocks wait
// for the norm. No step is redone.
// With a durable store, a commit is due `commit_every` updates after the previous commit. After
// such an update, blocks that are at home in memory are also written to storage. These writes come
// after all other writes. The next update of a block waits for the block's write. The commit begins
// when every block is on storage. If flushes are short, the commit also waits until the next step
// has fetched its units (engine/plan/commit_turn.h). Under `serial`, or with several ranks, the
// commit does not wait for these fetches. A commit makes three flushes, one after the other. The
// next version of a block is written only after the commit has begun. If storage has two copies of
// each block, the next version is written only after the commit has ended. If more than 4 updates
// lie between two commits, the simulation makes a commit after 4 updates. The cost of these commits
// is then scaled to the number of commits that really occur.
#pragma once

#include "engine/bound/step_cost.h"

namespace sluice {

// Returns the mean over several steps. The first steps, which fill the pipeline, are left out.
StepCost simulate_steps(const StepShape& shape, OverlapPolicy policy);

// Does the same as simulate_steps(), but always simulates as many updates between two commits as
// the shape says. A simulation ends early when a step begins in the same state as an earlier step.
StepCost simulate_whole_commits(const StepShape& shape, OverlapPolicy policy);

}  // namespace sluice
