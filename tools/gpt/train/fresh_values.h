// The initial state of a GPT, computed from a seed. The function is pure, and any thread may call
// it.
#pragma once

#include <cstdint>

#include <sluice/state.h>
#include "tools/gpt/model/gpt_config.h"

namespace sluice {

// Returns the values for Engine::initialize(). The engine must have the units of training_model().
// The result does not refer to the arguments.
InitialValues fresh_values(const gpt::GptConfig& config, std::uint64_t seed);

}  // namespace sluice
