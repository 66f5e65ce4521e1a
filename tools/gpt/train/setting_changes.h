// The changes of settings between the processes that continue one run. The application text of a
// saved state keeps a list of these changes. Each change in the list was accepted by the user, or
// does not affect the bits of the result.
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace sluice {

// A point at which a run continued with another setting.
struct SettingChange {
  std::uint64_t steps = 0;  // steps of the run before the change
  std::string key = {};     // empty: the list's name says what has changed
  std::string before = {};
  std::string after = {};
};

// Returns the changes in a list inside the text `application`. `list` is the name of the list. The
// result contains no entry that this program cannot have written.
std::vector<SettingChange> setting_changes_in(const nlohmann::json& application, const char* list);
// Adds `changes` to a list inside the text `application`. `list` is the name of the list. Does
// nothing if `changes` is empty.
void add_changes(nlohmann::json& application, const char* list,
                 const std::vector<SettingChange>& changes);

}  // namespace sluice
