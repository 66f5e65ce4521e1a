// The config of an engine as the text of a config file: trace files keep it, and ranks compare
// theirs. Pure; any thread.
#pragma once

#include <string>

#include <sluice/config.h>

namespace sluice {

// JSON with the keys of configs/sluice.schema.json, every one that the engine reads.
// engine_config() reads it back to the same config, apart from Config::Activations::micro_batches
// and order, which applications set.
std::string config_text(const Config& config);

}  // namespace sluice
