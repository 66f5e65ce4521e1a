#include "tools/gpt/train/setting_changes.h"

#include <nlohmann/json.hpp>

namespace sluice {

std::vector<SettingChange> setting_changes_in(const nlohmann::json& application, const char* list) {
  std::vector<SettingChange> changes;
  const auto found = application.find(list);
  if (found == application.end() || !found->is_array()) return changes;
  const auto text_in = [](const nlohmann::json& change, const char* key) {
    const auto text = change.find(key);
    return text != change.end() && text->is_string() ? text->get<std::string>() : std::string();
  };
  for (const nlohmann::json& change : *found) {
    if (!change.is_object() || !change.contains("step") || !change["step"].is_number_unsigned())
      continue;
    changes.push_back({.steps = change["step"].get<std::uint64_t>(),
                       .key = text_in(change, "key"),
                       .before = text_in(change, "was"),
                       .after = text_in(change, "is")});
  }
  return changes;
}

void add_changes(nlohmann::json& application, const char* list,
                 const std::vector<SettingChange>& changes) {
  for (const SettingChange& change : changes) {
    nlohmann::json entry{{"step", change.steps}, {"was", change.before}, {"is", change.after}};
    if (!change.key.empty()) entry["key"] = change.key;
    application[list].push_back(std::move(entry));
  }
}

}  // namespace sluice
