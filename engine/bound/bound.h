// The least time that a step can take, computed only from rates. T_min is the busy time of the
// step's scarcest resource. T_bound is the time of the ideal schedule under a policy, found by a
// simulation block by block (engine/bound/bound_simulation.h has the rules). The engine can close
// the distance to T_bound. The distance between T_bound and T_min is due to the policy, so the
// engine cannot close it. Pure: no I/O, no clock; callable from any thread.
#pragma once

#include <span>

#include "engine/bound/step_cost.h"

namespace sluice {

// The transfers of boundary activations count as busy time of storage and copies. So do the bytes
// of late units, each of which is read and written once more, and the arithmetic of all the updates
// that the unit has missed. The rest of the schedule is ideal. No step ends before these transfers
// and this arithmetic have ended.

// T_bound of `policy` (not kAuto), with the placement's lanes.
// Under kSpeculative, no step is redone. Requires: rates.units has an entry per unit.
StepCost bound_step(const StepShape& shape, OverlapPolicy policy);

// T_min: the busy time of the scarcest resource, with the fewest bytes that any policy moves.
StepCost minimum_step(const StepShape& shape);
// T_min, computed from the T_bounds of all policies that have a T_bound.
StepCost minimum_of(std::span<const StepCost> bounds);

}  // namespace sluice
