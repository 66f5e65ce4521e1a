// The state of a GPT that begins to train, from a seed. Pure; any thread.
#pragma once

#include <cstdint>

#include <sluice/state.h>
#include "tools/gpt/model/gpt_config.h"

namespace sluice {

// For Engine::initialize() of an engine with the units of training_model(). The result stands by
// itself.
InitialValues fresh_values(const gpt::GptConfig& config, std::uint64_t seed);

}  // namespace sluice
