// For oracles, these functions load or save one element of an array. The array may have any element
// type. The functions are pure.
#pragma once

#include <cstddef>
#include <cstdint>

#include <sluice/dtype.h>

namespace sluice::test {

inline float load(DType dtype, const std::byte* data, std::uint64_t index) {
  if (dtype == DType::kBf16)
    return float_from_bf16(reinterpret_cast<const std::uint16_t*>(data)[index]);
  if (dtype == DType::kFp16)
    return float_from_fp16(reinterpret_cast<const std::uint16_t*>(data)[index]);
  return reinterpret_cast<const float*>(data)[index];
}

inline void save(DType dtype, std::byte* data, std::uint64_t index, float value) {
  if (dtype == DType::kBf16) {
    reinterpret_cast<std::uint16_t*>(data)[index] = bf16_from_float(value);
  } else if (dtype == DType::kFp16) {
    reinterpret_cast<std::uint16_t*>(data)[index] = fp16_from_float(value);
  } else {
    reinterpret_cast<float*>(data)[index] = value;
  }
}

}  // namespace sluice::test
