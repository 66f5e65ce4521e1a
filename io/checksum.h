// The checksum of a block's bytes. The checksum is XXH3 with 64 bits. One core computes the
// checksum of about 12 GB per second. The checksum finds accidental damage, but does not protect
// against deliberate forgery. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace sluice {

std::uint64_t checksum(std::span<const std::byte> data);

// The checksum for durable data is XXH3 with 128 bits. As text, the checksum is written with 32
// hexadecimal digits.
struct Checksum128 {
  std::uint64_t high = 0;
  std::uint64_t low = 0;

  bool operator==(const Checksum128&) const = default;
};
Checksum128 checksum128(std::span<const std::byte> data);
std::string hex_of(const Checksum128& sum);

}  // namespace sluice
