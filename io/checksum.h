// The checksum of a block's bytes: XXH3 with 64 bits, about 12 GB/s on one core. It finds damage by
// accident; it is no defence against somebody who wants to forge a block. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace sluice {

std::uint64_t checksum(std::span<const std::byte> data);

}  // namespace sluice
