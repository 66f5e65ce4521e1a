// The building blocks of kernel bodies: stored elements with conversions to fp32, and teams of
// threads that share a row. So the same source runs on the GPU and, in tests, on the host. A body
// is a function object with a call operator for one index. gpu/cuda/cuda_launcher.h runs bodies on
// a GPU, and gpu/math/host_launcher.h runs bodies on the host device. Pure.
//
// A team has rank(), size(), sum() and max(). sum() and max() combine the values of all members.
// All members must call sum() and max(), and all members get the same result. On the host, a team
// is one thread.
#pragma once

#include <cstdint>

#include <sluice/device_function.h>
#include <sluice/dtype.h>
#include <sluice/elements.h>

namespace sluice {

SLUICE_HOST_DEVICE inline float load(float value) {
  return value;
}
SLUICE_HOST_DEVICE inline float load(Bf16 value) {
  return float_from_bf16(value.bits);
}
SLUICE_HOST_DEVICE inline float load(Fp16 value) {
  return float_from_fp16(value.bits);
}
SLUICE_HOST_DEVICE inline void store(float value, float& target) {
  target = value;
}
SLUICE_HOST_DEVICE inline void store(float value, Bf16& target) {
  target.bits = bf16_from_float(value);
}
SLUICE_HOST_DEVICE inline void store(float value, Fp16& target) {
  target.bits = fp16_from_float(value);
}

// Calls body with a null pointer to the element type that `dtype` names.
template <class Body>
auto with_element_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFp32: break;
    case DType::kBf16: return body(static_cast<Bf16*>(nullptr));
    case DType::kFp16: return body(static_cast<Fp16*>(nullptr));
  }
  return body(static_cast<float*>(nullptr));
}

// Eight elements that one thread reads or writes together, in accesses of 16 bytes. The array of
// the elements is aligned to 16 bytes.
inline constexpr std::uint64_t kPackElements = 8;
template <class T>
struct alignas(16) Pack {
  T values[kPackElements];
};

struct SerialTeam {
  unsigned rank() const { return 0; }
  unsigned size() const { return 1; }
  float sum(float value) const { return value; }
  float max(float value) const { return value; }
};

}  // namespace sluice
