// Well-known models by name, for plans without a file or a network. The file model_presets.json has
// the keys of their config.json that a plan needs, the number of parameters, and the source.
//
// Thread rule: any thread.
#pragma once

#include <optional>
#include <string>

#include "tools/zoo/config_json.h"

namespace sluice {

// The config of the model `name`, in upper or lower case. The result is empty if there is no such
// model.
std::optional<ConfigJson> model_preset(const std::string& name);

// All names, with commas between them.
std::string model_preset_names();

}  // namespace sluice
