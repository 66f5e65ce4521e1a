// The settings and the data that affect the results of a run. Every saved state keeps the settings
// as texts. A run that continues from a saved state compares the saved texts with its own texts.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tools/gpt/train/train_config.h"

namespace sluice {

// Returns the settings that a saved state keeps. The names of the settings are the keys of the
// config file.
std::map<std::string, std::string> settings_of(const TrainConfig& config, std::uint32_t ranks);
// Returns the value that replaces a missing value of `key` in an old checkpoint. A checkpoint lacks
// `key` if the checkpoint is older than the introduction of the key.
std::string value_before(const std::string& key);
// Returns the length and the checksum of the text in `path`.
// Fails with kInput if the file cannot be opened.
std::string describe_text(const std::string& path);

}  // namespace sluice
