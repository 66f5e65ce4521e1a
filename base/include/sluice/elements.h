// This header defines one C++ type for each element type. The C++ types give typed access to
// parameters and gradients. The C++ type of fp32 is float. Bf16 and Fp16 hold the bits of one
// element. The functions of sluice/dtype.h convert elements.
#pragma once

#include <cstdint>

#include <sluice/dtype.h>

namespace sluice {

struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};

// The dtype that belongs to the element type T. If T is not an element type, the compiler reports
// an error.
template <class T>
inline constexpr DType dtype_of = T::has_no_dtype;
template <>
inline constexpr DType dtype_of<float> = DType::kFp32;
template <>
inline constexpr DType dtype_of<Bf16> = DType::kBf16;
template <>
inline constexpr DType dtype_of<Fp16> = DType::kFp16;

}  // namespace sluice
