// The settings of a commit record have a limited length, but a config can name any number of
// tensors in groups, and any number of changes can be accepted. The functions make the long ones
// short. All functions are pure.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <sluice/config.h>
#include "io/checksum.h"

namespace sluice {

// Longer groups have a hash in place of their names. So have all groups, if all together are longer
// than kGroupsBytesMax.
inline constexpr std::size_t kGroupBytesMax = std::size_t{1} << 10;
inline constexpr std::size_t kGroupsBytesMax = std::size_t{64} << 10;
inline constexpr std::string_view kGroupKey = "optimizer.groups[";
// Accepted changes take no more room than this. The oldest ones make room for new ones.
inline constexpr std::size_t kChangesBytesMax = std::size_t{128} << 10;
inline constexpr std::size_t kChangeBytesMax = std::size_t{4} << 10;

// `group` is a group's names, learning rate factor and weight decay, or already the result of this
// function. Returns the same with a hash in place of the names if `group` is longer than
// `bytes_max`.
inline std::string short_group(const std::string& group, std::size_t bytes_max) {
  constexpr std::string_view kHash = "names of hash ";
  const std::size_t decay = group.rfind(' ');
  if (group.size() <= bytes_max || decay == std::string::npos || decay == 0) return group;
  const std::size_t factor = group.rfind(' ', decay - 1);
  if (factor == std::string::npos || group.starts_with(kHash)) return group;
  const std::string names = group.substr(0, factor);
  return fmt::format("{}{:016x}{}", kHash, checksum(std::as_bytes(std::span(names))),
                     group.substr(factor));
}

// Returns whether two texts of groups, each whole or short, are of the same group.
inline bool is_same_group(const std::string& one, const std::string& other) {
  return short_group(one, 0) == short_group(other, 0);
}

// Returns the groups' texts, by key.
inline std::map<std::string, std::string> words_of_groups(
    const std::vector<Config::Optimizer::Group>& groups) {
  std::map<std::string, std::string> words;
  for (const std::size_t bytes_max : {kGroupBytesMax, std::size_t{0}}) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const std::string whole =
          fmt::format("{} {} {}", fmt::join(groups[i].tensors, " "), groups[i].learning_rate_factor,
                      groups[i].weight_decay.value_or(-1));
      const std::string text = short_group(whole, bytes_max);
      std::string& word = words[fmt::format("{}{}]", kGroupKey, i)];
      word = text.size() < whole.size() ? text : whole;
      bytes += word.size();
    }
    if (bytes <= kGroupsBytesMax) break;
  }
  return words;
}

// Removes what has no room from the list of accepted changes. The last entry stays.
inline void shorten_changes(nlohmann::json& list, std::size_t bytes_max) {
  const auto text = [](const nlohmann::json& entry) {
    return entry.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  };
  std::size_t bytes = 2;
  std::size_t kept = 0;
  for (auto entry = list.rbegin(); entry != list.rend(); ++entry, ++kept) {
    if (entry->is_object() && text(*entry).size() > kChangeBytesMax)  // of an older version
      (*entry)["change"] = "the text of this change was too long, and is left out";
    bytes += text(*entry).size() + 1;
    if (kept > 0 && bytes > bytes_max) break;
  }
  if (kept < list.size())
    list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(list.size() - kept));
}

}  // namespace sluice
