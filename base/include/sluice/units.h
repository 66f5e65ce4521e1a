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

// For people: "9.5 MiB", "512 B", with about three significant digits.
std::string format_bytes(std::uint64_t bytes);

// Parses "4096", "64KiB", "1.5GiB", "2TB", "24G" or "10 mib", in any case. K, M, G and T are binary
// alone and with iB, and decimal with B; a number without a unit is in bytes.
// Fails with: kConfig when the text is not a size, is negative, is not a whole number of bytes, or
// is beyond 2^63.
std::uint64_t parse_size(std::string_view text);

}  // namespace sluice
