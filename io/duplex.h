// Whether a drive reads and writes at once. Pure data.
#pragma once

#include <cstdint>

namespace sluice {

enum class Duplex : std::uint8_t {
  kFull,  // reads and writes at once, each at its rate
  kHalf,  // one budget: reading R and writing W takes R / r + W / w
};

}  // namespace sluice
