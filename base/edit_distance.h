// The distance between two words. Error messages use this distance to guess which word the user
// meant. The function is pure.
#pragma once

#include <cstddef>
#include <string_view>

namespace sluice {

// Returns the Levenshtein distance. This is the smallest number of letters that must be added,
// dropped or replaced to turn `a` into `b`.
std::size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace sluice
