// An engine's config as the text of a config file, for whoever writes a config down: trace files,
// and ranks that compare theirs. Pure; any thread.
#pragma once

#include <string>

#include <sluice/config.h>

namespace sluice {

// JSON with the keys of configs/sluice.schema.json, every one that the engine reads.
// engine_config() reads it back to the same config, apart from Config::Activations::micro_batches
// and order, which applications set.
std::string config_text(const Config& config);

}  // namespace sluice
