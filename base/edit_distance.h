// The distance between two words, for messages that guess the intended word. Pure.
#pragma once

#include <cstddef>
#include <string_view>

namespace sluice {

// The Levenshtein distance: the number of letters to add, drop or replace.
std::size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace sluice
