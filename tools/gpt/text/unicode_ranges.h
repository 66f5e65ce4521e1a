// The ranges of Unicode's letters (general category L), numbers (N) and spaces (White_Space). The
// functions are pure.
#pragma once

#include <span>

namespace sluice {

struct CodeRange {
  char32_t first = 0;
  char32_t last = 0;
};

// The ranges are sorted, and do not overlap.
std::span<const CodeRange> letter_ranges();
std::span<const CodeRange> number_ranges();
std::span<const CodeRange> space_ranges();

}  // namespace sluice
