// The letters (general category L), numbers (N) and spaces (White_Space) of Unicode. Pure.
#pragma once

#include <span>

namespace sluice {

struct CodeRange {
  char32_t first = 0;
  char32_t last = 0;
};

// Sorted, without overlap.
std::span<const CodeRange> letter_ranges();
std::span<const CodeRange> number_ranges();
std::span<const CodeRange> space_ranges();

}  // namespace sluice
