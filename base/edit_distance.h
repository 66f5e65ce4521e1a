// How far one word is from another, for messages that guess the intended word. Pure.
#pragma once

#include <cstddef>
#include <string_view>

namespace sluice {

// Levenshtein's distance: letters to add, drop or replace.
std::size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace sluice
