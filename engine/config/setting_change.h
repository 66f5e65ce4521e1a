// Says how a setting of a saved run differs from the setting of this run. Some settings are saved
// as one text with several numbers, such as the learning rate's schedule. The messages name the
// config key of each number.
//
// Thread rule: any thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// Returns one text for each config key in the setting `key` whose value differs. An example is
// "optimizer.schedule_steps was 100 and is 200". Requires: `before` and `after` differ.
std::vector<std::string> setting_change(std::string_view key, std::string_view before,
                                        std::string_view after);

}  // namespace sluice
