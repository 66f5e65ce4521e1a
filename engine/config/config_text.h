// Converts the config of an engine to the text of a config file. Trace files contain this text.
// Ranks compare their texts to check that their configs are equal. The function is pure, and any
// thread may call it.
#pragma once

#include <string>

#include <sluice/config.h>

namespace sluice {

// Returns JSON with all keys of configs/sluice.schema.json that the engine reads. engine_config()
// makes the same config again from this JSON, except that a size above 2^63 - 1 becomes 2^63 - 1.
// The JSON lacks two members of Config::Activations, `micro_batches` and `order`, because
// applications set these members.
std::string config_text(const Config& config);

}  // namespace sluice
