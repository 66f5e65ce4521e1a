// The functions return the text of a config file in which some keys are changed. The text can be
// written to a file and read again.
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include <map>
#include <string>

#include <sluice/config_document.h>

namespace sluice {

// Returns a JSON text with the keys of `document` that have a value from the file or from --set.
// The text has no comments and no other keys.
// Fails with kConfig if a value from --set has bytes that are no UTF-8, because no JSON has them.
std::string config_text_of(const ConfigDocument& document);

// Returns a copy of the JSON text `config`. In the copy, each key of `changes` has the JSON value
// from `changes`. The value "null" removes the key.
// Requires: `config` and all values are valid JSON.
std::string changed_config_text(const std::string& config,
                                const std::map<std::string, std::string>& changes);

}  // namespace sluice
