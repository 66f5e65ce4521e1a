// A hash of an operation and its sizes, by which ranks of a host notice that they run different
// operations. Pure.
#pragma once

#include <cstdint>
#include <string_view>

namespace sluice {

// FNV-1a, which takes some tens of nanoseconds.
inline std::uint32_t operation_hash(std::string_view kind, std::uint64_t size, std::uint32_t type) {
  std::uint32_t hash = 2166136261u;
  const auto add = [&hash](std::uint8_t byte) { hash = (hash ^ byte) * 16777619u; };
  for (const char letter : kind) add(static_cast<std::uint8_t>(letter));
  for (int shift = 0; shift < 64; shift += 8) add(static_cast<std::uint8_t>(size >> shift));
  for (int shift = 0; shift < 32; shift += 8) add(static_cast<std::uint8_t>(type >> shift));
  return hash;
}

}  // namespace sluice
