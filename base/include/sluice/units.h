// Sizes and the integer arithmetic on them: literals (64_KiB), rounding with its intent spelled
// out, and the text form of sizes that configs and messages use ("10MiB"). Pure functions, callable
// from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sluice {

inline namespace literals {
constexpr std::uint64_t operator""_KiB(unsigned long long count) {
  return count << 10;
}
constexpr std::uint64_t operator""_MiB(unsigned long long count) {
  return count << 20;
}
constexpr std::uint64_t operator""_GiB(unsigned long long count) {
  return count << 30;
}
}  // namespace literals

constexpr std::uint64_t div_ceil(std::uint64_t value, std::uint64_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return div_ceil(value, alignment) * alignment;
}

constexpr bool is_aligned(std::uint64_t value, std::uint64_t alignment) {
  return value % alignment == 0;
}

// "9.5 MiB", "512 B": three significant digits or so, for people.
std::string format_bytes(std::uint64_t bytes);

// Parses "4096", "64KiB", "10 MiB", "1.5GiB", "2TB" (decimal units K, M, G, T with B; binary ones
// with iB; no unit = bytes).
// Fails with: kConfig when the text is no size, negative, not a whole number of bytes, or beyond
// 2^63.
std::uint64_t parse_size(std::string_view text);

}  // namespace sluice
