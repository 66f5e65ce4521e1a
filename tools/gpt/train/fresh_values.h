// The state of a GPT that begins to train, from a seed. Pure; any thread.
#pragma once

#include <cstdint>

#include <sluice/state.h>
#include "tools/gpt/model/gpt_config.h"

namespace sluice {

// The function is for Engine::initialize() of an engine with the units of training_model(). The
// result refers to no argument.
InitialValues fresh_values(const gpt::GptConfig& config, std::uint64_t seed);

}  // namespace sluice
