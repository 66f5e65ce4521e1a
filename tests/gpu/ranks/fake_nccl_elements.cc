#include "tests/gpu/ranks/fake_nccl_elements.h"

#include <nccl.h>

#include <cstdint>

#include <sluice/dtype.h>

namespace sluice::test {

float load(int type, const void* data, std::size_t i) {
  if (type == ncclFloat32) return static_cast<const float*>(data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
  return type == ncclBfloat16 ? float_from_bf16(bits) : float_from_fp16(bits);
}
void save(int type, void* data, std::size_t i, float value) {
  if (type == ncclFloat32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<std::uint16_t*>(data)[i] =
        type == ncclBfloat16 ? bf16_from_float(value) : fp16_from_float(value);
  }
}
std::size_t size_of(int type) {
  return type == ncclFloat32 ? 4 : type == ncclInt8 ? 1 : 2;
}

}  // namespace sluice::test
