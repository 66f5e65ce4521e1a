// A config file with some of its keys changed, as text that can be written and read again.
//
// Thread rule: pure.
#pragma once

#include <map>
#include <string>

#include <sluice/config_document.h>

namespace sluice {

// Returns the JSON text of every key that `document` sets, whether in the file or by --set. Keys
// with their default are left out, and so are comments.
std::string config_text_of(const ConfigDocument& document);

// Returns `config`, a JSON text, with each key of `changes` set to its JSON value. A value of
// "null" removes the key.
// Requires: `config` and all values are valid JSON.
std::string changed_config_text(const std::string& config,
                                const std::map<std::string, std::string>& changes);

}  // namespace sluice
