#include "tools/zoo/model_presets.h"

#include <algorithm>
#include <cctype>
#include <vector>

#include <fmt/ranges.h>

namespace sluice {

extern const char* const kModelPresetsText;  // model_presets.json

namespace {

const nlohmann::ordered_json& all_presets() {
  static const auto presets = nlohmann::ordered_json::parse(kModelPresetsText);
  return presets;
}

}  // namespace

std::optional<ConfigJson> model_preset(const std::string& name) {
  std::string lower = name;
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
  const auto found = all_presets().find(lower);
  if (found == all_presets().end()) return std::nullopt;
  return ConfigJson(lower, found->at("config"));
}

std::string model_preset_names() {
  std::vector<std::string> names;
  for (const auto& [name, preset] : all_presets().items()) names.push_back(name);
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace sluice
