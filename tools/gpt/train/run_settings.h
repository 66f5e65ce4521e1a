// The settings and the data that affect the results of a run. Every saved state keeps the settings
// as texts. A run that continues from a saved state compares the saved texts with its own texts.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "tools/gpt/train/train_config.h"

namespace sluice {

// Returns the settings that a saved state keeps. The names of the settings are the keys of the
// config file.
std::map<std::string, std::string> settings_of(const TrainConfig& config, std::uint32_t ranks);
// The key for the library that computes the matrix products. The trainer adds this setting.
inline constexpr const char* kProducts = "matrix products";
// Returns the value of `key` among the settings of a saved state. A checkpoint lacks `key` if the
// checkpoint is older than the introduction of the key. The result is then the value that all older
// versions had. If that value is unknown, the result is empty, and the setting is not compared.
std::optional<std::string> value_before(const std::map<std::string, std::string>& saved,
                                        const std::string& key);
// Returns true if the setting says how many ranks there are, or how the ranks share the work. A run
// may be resumed on other ranks, and only a note says so.
bool follows_ranks(const std::string& key);
// Returns an application text for a state that has no such text. With this text, a run with
// `config` can continue from the state.
// Fails with kInput if the config's data cannot be opened.
std::string application_for(const TrainConfig& config, std::uint32_t ranks, std::uint64_t steps);
// Returns a setting that a saved state's application text has. Returns nothing if there is no such
// setting, or if another program has written the text.
std::optional<std::string> saved_setting(const std::string& application, const std::string& key);
// Returns the length and the checksum of the text in `path`.
// Fails with kInput if the file cannot be opened, and with kIo if it cannot be read.
std::string describe_text(const std::string& path);

}  // namespace sluice
