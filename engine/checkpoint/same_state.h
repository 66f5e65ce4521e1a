// Checks that an engine can continue with a saved state. The function is pure.
#pragma once

#include <string>

#include <sluice/checkpoint.h>

namespace sluice {

// In messages, `where` names the place of the saved state.
// Fails with kInput if `own` and `wanted` differ in model, precision, optimizer or frozen units.
// The message names the field, the found value, the value that the config asks for, and the remedy.
void require_same_state(const StateDescription& own, const StateDescription& wanted,
                        CheckpointPrecision precision, const std::string& where);

// Sets the number of updates to 0 for each tensor that is frozen in `own` and not in `wanted`: it
// begins with zero moments, and the bias correction has to know.
void restart_unfrozen(const StateDescription& own, const StateDescription& wanted,
                      StatePosition& position);

}  // namespace sluice
