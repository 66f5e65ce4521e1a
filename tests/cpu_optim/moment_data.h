// Moments as 8-bit codes, for tests. Each object owns the memory of its codes. The objects are not
// thread-safe.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_optim/moment_codec.h"

namespace sluice {

// The codes and scales of one moment. The moment may have any length.
struct Codes {
  explicit Codes(std::size_t count) : codes(count), scales((count + 255) / 256) {}
  MomentCodes view() { return {.codes = codes.data(), .scales = scales.data()}; }
  bool operator==(const Codes& other) const {
    return codes == other.codes &&
           std::memcmp(scales.data(), other.scales.data(), scales.size() * sizeof(float)) == 0;
  }

  std::vector<std::uint8_t> codes;
  std::vector<float> scales;
};

inline Codes encoded(CodeBook book, const std::vector<float>& values) {
  Codes codes(values.size());
  encode_moments(book, values, codes.view());
  return codes;
}

inline std::vector<float> decoded(CodeBook book, Codes& codes) {
  std::vector<float> values(codes.codes.size());
  decode_moments(book, codes.view(), 0, values);
  return values;
}

}  // namespace sluice
