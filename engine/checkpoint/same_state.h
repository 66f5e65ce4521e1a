// Whether a state that lies somewhere is one of what an engine keeps. Pure.
#pragma once

#include <string>

#include <sluice/checkpoint.h>

namespace sluice {

// `where` the state lies stands in messages.
// Fails with: kInput where model, precision, optimizer or frozen units differ, naming the field,
// what is there, what the config asks for, and what to do.
void require_same_state(const StateDescription& own, const StateDescription& wanted,
                        CheckpointPrecision precision, const std::string& where);

}  // namespace sluice
