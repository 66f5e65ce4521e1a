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

}  // namespace sluice
