#include "tools/report/config_changes.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "engine/config/config_schema_check.h"

namespace sluice {
namespace {

using nlohmann::ordered_json;

ordered_json::json_pointer pointer_to(const std::string& key) {
  std::string path = "/" + key;
  std::ranges::replace(path, '.', '/');
  return ordered_json::json_pointer(path);
}

}  // namespace

std::string config_text_of(const ConfigDocument& document) {
  ordered_json values = ordered_json::object();
  for (const std::string& key : config_keys()) {
    if (document.origin_of(key) != "default")
      values[pointer_to(key)] = ordered_json::parse(document.json_of(key));
  }
  return values.dump(2) + "\n";
}

std::string changed_config_text(const std::string& config,
                                const std::map<std::string, std::string>& changes) {
  ordered_json values = ordered_json::parse(config);
  for (const auto& [key, text] : changes) {
    const ordered_json value = ordered_json::parse(text);
    const auto pointer = pointer_to(key);
    if (!value.is_null()) {
      values[pointer] = value;
    } else if (values.contains(pointer)) {
      values[pointer.parent_pointer()].erase(pointer.back());
    }
  }
  return values.dump(2) + "\n";
}

}  // namespace sluice
