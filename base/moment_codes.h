// The moments are stored in 8 bits by block-wise dynamic quantization (Dettmers et al. 2022, "8-bit
// Optimizers via Block-wise Quantization", as in bitsandbytes). Each group of 256 consecutive
// elements of a tensor has one fp32 scale, which is the largest magnitude in the group. Each
// element has a code. The moment is the code's value times the group's scale. The codes of exp_avg
// have both signs. The codes of exp_avg_sq have no sign. These functions define the result, and
// faster versions must give the same bits. The functions are pure, and any thread may call them.
//
// An element gets the code whose value is nearest to moment / scale. If two codes are equally near,
// the element gets the lower code. If all values of a group are 0, the scale is 0, and each code of
// the group is the code of zero. If any value of a group is infinite or NaN, the scale is infinite,
// and all values of the group are lost. In such a group, the highest code marks each element that
// was infinite or NaN.
#pragma once

#include <cstdint>

#include <sluice/device_function.h>
#include <sluice/dtype.h>

namespace sluice {

inline constexpr std::uint64_t kMomentGroupElements = 256;

enum class CodeBook : std::uint8_t { kSigned, kUnsigned };

// Returns the code that stands for the value 0.
SLUICE_HOST_DEVICE constexpr std::uint8_t zero_code(CodeBook book) {
  return book == CodeBook::kSigned ? 127 : 0;
}
inline constexpr std::uint8_t kLostCode = 255;

// The values of the codes. On a GPU, the table is local to the function that reads it. On the host,
// the table is outside of the function, because a local table would be copied to the stack for
// every look-up.
#ifndef __CUDA_ARCH__
inline constexpr float kSignedCodeValues[256] = {
#include "base/moment_codes_signed.inc"
};
inline constexpr float kUnsignedCodeValues[256] = {
#include "base/moment_codes_unsigned.inc"
};
#endif

SLUICE_HOST_DEVICE constexpr float signed_code_value(std::uint32_t code) {
#ifdef __CUDA_ARCH__
  constexpr float kSignedCodeValues[256] = {
#include "base/moment_codes_signed.inc"
  };
#endif
  return kSignedCodeValues[code];
}
SLUICE_HOST_DEVICE constexpr float unsigned_code_value(std::uint32_t code) {
#ifdef __CUDA_ARCH__
  constexpr float kUnsignedCodeValues[256] = {
#include "base/moment_codes_unsigned.inc"
  };
#endif
  return kUnsignedCodeValues[code];
}

// Returns the value that a code has if the scale is 1. The values are the dynamic 8-bit map that
// bitsandbytes publishes.
SLUICE_HOST_DEVICE constexpr float code_value(CodeBook book, std::uint32_t code) {
  return book == CodeBook::kSigned ? signed_code_value(code) : unsigned_code_value(code);
}

// Returns the value halfway between the values of two neighboring codes. This value is exact in
// fp64.
SLUICE_HOST_DEVICE constexpr double code_middle(CodeBook book, std::uint32_t lower_code) {
  return (static_cast<double>(code_value(book, lower_code)) +
          static_cast<double>(code_value(book, lower_code + 1))) *
         0.5;
}

// Returns the code whose value is nearest to `value`. `value` is between -1 and 1.
SLUICE_HOST_DEVICE inline std::uint8_t nearest_code(CodeBook book, float value) {
  std::uint32_t code = 0;  // the number of middles below `value`
  for (std::uint32_t step = 128; step != 0; step /= 2) {
    if (static_cast<double>(value) > code_middle(book, code + step - 1)) code += step;
  }
  return static_cast<std::uint8_t>(code);
}

SLUICE_HOST_DEVICE inline bool is_finite_moment(float value) {
  return (bits_from_float(value) & 0x7fffffffu) < 0x7f800000u;
}

// Returns the magnitude of one moment. The magnitude of a NaN is infinite. The largest magnitude in
// a group is the group's scale.
SLUICE_HOST_DEVICE inline float moment_magnitude(float value) {
  return is_finite_moment(value) ? float_from_bits(bits_from_float(value) & 0x7fffffffu)
                                 : float_from_bits(0x7f800000u);
}

SLUICE_HOST_DEVICE inline std::uint8_t encode_moment(CodeBook book, float value, float scale) {
  if (scale == 0) return zero_code(book);
  if (!is_finite_moment(scale)) return is_finite_moment(value) ? zero_code(book) : kLostCode;
  return nearest_code(book, value / scale);
}

SLUICE_HOST_DEVICE inline float decode_moment(CodeBook book, std::uint8_t code, float scale) {
  return code_value(book, code) * scale;
}

// Returns whether the encoded moment was infinite or NaN.
SLUICE_HOST_DEVICE inline bool is_lost_moment(std::uint8_t code, float scale) {
  return code == kLostCode && !is_finite_moment(scale);
}

}  // namespace sluice
