// Oracles for the 16-bit conversions. The oracles compute with doubles instead of bit patterns, and
// round with a division and nearbyint. The functions are slow, plain and pure.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include <sluice/dtype.h>

namespace sluice {

struct SmallFloatFormat {
  int exponent_bits;
  int mantissa_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int lowest_exponent() const { return 1 - bias(); }  // of normal numbers
  double max_finite() const { return std::ldexp(2.0 - std::ldexp(1.0, -mantissa_bits), bias()); }
  std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  }
};

inline constexpr SmallFloatFormat kBf16Format{8, 7};
inline constexpr SmallFloatFormat kFp16Format{5, 10};

// Returns the value that `pattern` stands for.
inline double oracle_decode(SmallFloatFormat format, std::uint16_t pattern) {
  const double sign = pattern >= 0x8000 ? -1.0 : 1.0;
  const int field = (pattern % 0x8000) / (1 << format.mantissa_bits);
  const int mantissa = pattern % (1 << format.mantissa_bits);
  if (field == (1 << format.exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (field == 0) {
    return sign * std::ldexp(mantissa, format.lowest_exponent() - format.mantissa_bits);
  }
  return sign * std::ldexp((1 << format.mantissa_bits) + mantissa,
                           field - format.bias() - format.mantissa_bits);
}

enum class Ties { kToEven, kAwayFromZero };

// Rounds `value` to the nearest number that the format can represent. Requires: `value` is not NaN.
inline double oracle_round(SmallFloatFormat format, double value, Ties ties) {
  if (value == 0.0 || std::isinf(value)) return value;
  const int exponent = std::max(std::ilogb(value), format.lowest_exponent());
  const double unit = std::ldexp(1.0, exponent - format.mantissa_bits);
  const double steps = value / unit;  // exact, because unit is a power of two
  const double rounded = (ties == Ties::kToEven ? std::nearbyint(steps) : std::round(steps)) * unit;
  if (std::fabs(rounded) <= format.max_finite()) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), value);
}

// Returns whether two doubles are the same number, including the sign of zero.
inline bool same_value(double a, double b) {
  return a == b && std::signbit(a) == std::signbit(b);
}

}  // namespace sluice
