// Says whether a drive can read and write at the same time.
#pragma once

#include <cstdint>

namespace sluice {

enum class Duplex : std::uint8_t {
  kFull,  // reads and writes at the same time, each at its rate
  kHalf,  // at rates r and w, reading R bytes and writing W bytes takes R / r + W / w
};

}  // namespace sluice
