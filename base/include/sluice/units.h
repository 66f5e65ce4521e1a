// This header has literals for sizes in bytes (64_KiB), functions that round sizes, and functions
// that print and parse sizes ("10MiB"). The functions are pure, and any thread may call them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <sluice/export.h>

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

// Returns a readable text with about three significant digits: "9.5 MiB", "512 B".
SLUICE_EXPORT std::string format_bytes(std::uint64_t bytes);

// Parses "4096", "64KiB", "1.5GiB", "2TB", "24G" or "10 mib". Letters may be upper or lower case.
// K, M, G and T, with or without iB, stand for powers of 1024. KB, MB, GB and TB stand for powers
// of 1000. A number without a unit is in bytes. Fails with kConfig if the text is not a size, is
// negative, is not a whole number of bytes, or is beyond 2^63.
SLUICE_EXPORT std::uint64_t parse_size(std::string_view text);

}  // namespace sluice
