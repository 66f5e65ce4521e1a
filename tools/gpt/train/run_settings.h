// The settings and the data that decide the numbers of a run. The settings are texts that every
// saved state keeps. A run that continues from a saved state compares these texts with its own.
//
// Thread rule: plain functions.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tools/gpt/train/train_config.h"

namespace sluice {

// The settings that are kept beside the state, with names as in the config file.
std::map<std::string, std::string> settings_of(const TrainConfig& config, std::uint32_t ranks);
// The value of `key` for a checkpoint that is older than the key, and so does not name it.
std::string value_before(const std::string& key);
// The length and the checksum of a text.
// Fails with kInput if the file cannot be opened.
std::string describe_text(const std::string& path);

}  // namespace sluice
