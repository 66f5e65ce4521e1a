// load() converts a stored element to fp32, and store() converts an fp32 value to a stored element.
// The functions run on the host and on the device. The conversions are the same as in
// sluice/dtype.h. The C++ type of an element selects the conversion. No DType value is needed. The
// functions are pure.
#pragma once

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

// Calls `body` with a null pointer to the C++ type that belongs to `dtype`.
template <class Body>
auto with_element_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFp32: break;
    case DType::kBf16: return body(static_cast<Bf16*>(nullptr));
    case DType::kFp16: return body(static_cast<Fp16*>(nullptr));
  }
  return body(static_cast<float*>(nullptr));
}

}  // namespace sluice
