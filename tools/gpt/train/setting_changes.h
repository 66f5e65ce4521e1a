// The settings that differ from one life of a run to the next, as the text of a saved state keeps
// them. Such changes were accepted by the user, or change no bit.
//
// Thread rule: pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace sluice {

// A point at which a run continued with another setting.
struct SettingChange {
  std::uint64_t steps = 0;  // of the run until then
  std::string key = {};     // empty: the list says what has changed
  std::string before = {};
  std::string after = {};
};

// The changes in a list of the text. Entries that this program cannot have written are left out.
std::vector<SettingChange> setting_changes_in(const nlohmann::json& application, const char* list);
// Adds the list to the text, unless it is empty.
void add_changes(nlohmann::json& application, const char* list,
                 const std::vector<SettingChange>& changes);

}  // namespace sluice
