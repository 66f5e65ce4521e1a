// Element types and the exact conversions between them. Values of bf16 and fp16 are stored as
// uint16_t bit patterns. These scalar functions define the conversions, and SIMD and CUDA code must
// reproduce them bit for bit. The functions are pure, and any thread may call them.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include <sluice/device_function.h>

namespace sluice {

enum class DType : std::uint8_t { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

constexpr std::uint64_t size_of(DType dtype) {
  return dtype == DType::kFp32 ? 4 : 2;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kFp32: return "fp32";
    case DType::kBf16: return "bf16";
    case DType::kFp16: return "fp16";
  }
  return "unknown";
}

SLUICE_HOST_DEVICE inline float float_from_bits(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}
SLUICE_HOST_DEVICE inline std::uint32_t bits_from_float(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

SLUICE_HOST_DEVICE inline float float_from_bf16(std::uint16_t value) {
  return float_from_bits(static_cast<std::uint32_t>(value) << 16);
}

// The conversion rounds to the nearest value, with ties to even. Overflow becomes infinity. A NaN
// becomes a quiet NaN with a truncated payload.
SLUICE_HOST_DEVICE inline std::uint16_t bf16_from_float(float value) {
  const std::uint32_t bits = bits_from_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

SLUICE_HOST_DEVICE inline float float_from_fp16(std::uint16_t value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value & 0x8000u) << 16;
  const std::uint32_t exponent = (value >> 10) & 0x1fu;
  const std::uint32_t mantissa = value & 0x3ffu;
  if (exponent == 0x1fu) return float_from_bits(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return float_from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  // The value of a subnormal is mantissa * 2^-24, and fp32 holds this value exactly.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return float_from_bits(sign | bits_from_float(magnitude));
}

// The conversion rounds to the nearest value, with ties to even. Overflow becomes infinity. A NaN
// becomes a quiet NaN with a truncated payload.
SLUICE_HOST_DEVICE inline std::uint16_t fp16_from_float(float value) {
  const std::uint32_t bits = bits_from_float(value);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x47800000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // >= 65536
  if (magnitude >= 0x38800000u) {  // normal: >= 2^-14
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  // If the result is subnormal, the code adds 0.5 in fp32. This addition rounds to a multiple of
  // 2^-24, with ties to even. So the lowest bits of the sum are the bits of the result.
  const std::uint32_t shifted = bits_from_float(float_from_bits(magnitude) + 0.5f);
  return static_cast<std::uint16_t>(sign | (shifted - 0x3f000000u));
}

}  // namespace sluice
