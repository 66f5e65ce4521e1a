// These functions compute lower bounds for the time of a step from rates alone. T_min is the busy
// time of the step's scarcest resource. T_bound is the time of the ideal schedule under a policy. A
// simulation finds T_bound block by block (engine/bound/bound_simulation.h has the rules). A faster
// engine could reach T_bound. The difference between T_bound and T_min comes from the policy, so no
// engine can remove this difference. The functions are pure: they use neither I/O nor a clock. Any
// thread may call them.
#pragma once

#include <span>

#include "engine/bound/step_cost.h"

namespace sluice {

// The transfers of boundary activations count as busy time, both for storage and for copies. A late
// unit is read and written once more, and this traffic also counts as busy time. The arithmetic of
// a late unit's missed updates also counts as busy time. No step ends before these transfers and
// this arithmetic have ended. The rest of the schedule is ideal.

// Returns T_bound of `policy`. The number of lanes comes from the placement. `policy` is not kAuto.
// Under kSpeculative, the schedule never repeats a step. Requires: rates.units has one entry per
// unit.
StepCost bound_step(const StepShape& shape, OverlapPolicy policy);

// Returns T_min, the busy time of the scarcest resource. T_min is computed for the
// policy that moves the fewest bytes.
StepCost minimum_step(const StepShape& shape);
// Computes T_min from `bounds`, which has one T_bound for each possible policy.
StepCost minimum_of(std::span<const StepCost> bounds);

}  // namespace sluice
