// The distance between two words. Error messages use it to guess which word the user meant. Pure.
#pragma once

#include <cstddef>
#include <string_view>

namespace sluice {

// The Levenshtein distance: the smallest number of letters to add, drop or replace.
std::size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace sluice
