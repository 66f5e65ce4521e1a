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

#include <bit>
#include <cstdint>
#include <limits>

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

// The 256 codes of a code book in ascending order of their values.
struct CodeBookTable {
  float values[256];
  // The largest fp32 value that gets the code. For the last code, the limit is infinite.
  float limits[256];
};

// Returns the value halfway between two neighboring values. This value is exact in fp64.
constexpr double code_middle(float lower, float upper) {
  return (static_cast<double>(lower) + static_cast<double>(upper)) * 0.5;
}

// Returns the largest fp32 value that is not above `value`.
constexpr float rounded_down(double value) {
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) <= value) return nearest;
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  return std::bit_cast<float>(nearest > 0 ? bits - 1 : bits + 1);
}

// The values are the dynamic 8-bit map that bitsandbytes publishes.
constexpr CodeBookTable make_code_book_table(CodeBook book) {
  constexpr float kSignedValues[256] = {
#include "base/moment_codes_signed.inc"
  };
  constexpr float kUnsignedValues[256] = {
#include "base/moment_codes_unsigned.inc"
  };
  const float* const values = book == CodeBook::kSigned ? kSignedValues : kUnsignedValues;
  CodeBookTable table{};
  for (std::uint32_t code = 0; code < 256; ++code) {
    table.values[code] = values[code];
    table.limits[code] = code == 255 ? std::numeric_limits<float>::infinity()
                                     : rounded_down(code_middle(values[code], values[code + 1]));
  }
  return table;
}

// The tables lie outside of the functions that read them. A local table would be copied to the
// stack for every look-up, on the CPU and on a GPU. A GPU has the tables in its own memory.
inline constexpr CodeBookTable kSignedCodes = make_code_book_table(CodeBook::kSigned);
inline constexpr CodeBookTable kUnsignedCodes = make_code_book_table(CodeBook::kUnsigned);
#ifdef __CUDACC__
static __device__ constexpr CodeBookTable kSignedCodesOnDevice = kSignedCodes;
static __device__ constexpr CodeBookTable kUnsignedCodesOnDevice = kUnsignedCodes;
#endif

SLUICE_HOST_DEVICE constexpr const CodeBookTable& code_book_table(CodeBook book) {
#ifdef __CUDA_ARCH__
  return book == CodeBook::kSigned ? kSignedCodesOnDevice : kUnsignedCodesOnDevice;
#else
  return book == CodeBook::kSigned ? kSignedCodes : kUnsignedCodes;
#endif
}

// Returns the value that a code has if the scale is 1.
SLUICE_HOST_DEVICE constexpr float code_value(CodeBook book, std::uint32_t code) {
  return code_book_table(book).values[code];
}

// Returns the code whose value is nearest to `value`. `value` is between -1 and 1.
SLUICE_HOST_DEVICE inline std::uint8_t nearest_code(CodeBook book, float value) {
  const float* const limits = code_book_table(book).limits;
  std::uint32_t code = 0;  // the number of limits below `value`
  for (std::uint32_t step = 128; step != 0; step /= 2) {
    if (value > limits[code + step - 1]) code += step;
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
