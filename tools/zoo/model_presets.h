// The functions find well-known models by name. A plan for such a model needs neither a file nor a
// network. model_presets.json contains the data of each model: the keys of config.json that a plan
// needs, the number of parameters, and the source.
//
// Thread rule: any thread.
#pragma once

#include <optional>
#include <string>

#include "tools/zoo/config_json.h"

namespace sluice {

// Returns the config of the model `name`. The name may be in upper or lower case. Returns nothing
// if there is no such model.
std::optional<ConfigJson> model_preset(const std::string& name);

// Returns all names of models, separated by commas.
std::string model_preset_names();

}  // namespace sluice
