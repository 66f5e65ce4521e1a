#include "cpu_optim/rank_sum.h"

#include <sluice/error.h>
#include "base/float_environment.h"
#include "cpu_optim/simd_kernels.h"

namespace sluice {
namespace {

float load(DType dtype, const void* data, std::uint64_t index) {
  switch (dtype) {
    case DType::kFp32: break;
    case DType::kBf16: return float_from_bf16(static_cast<const std::uint16_t*>(data)[index]);
    case DType::kFp16: return float_from_fp16(static_cast<const std::uint16_t*>(data)[index]);
  }
  return static_cast<const float*>(data)[index];
}

void store(DType dtype, void* data, std::uint64_t index, float value) {
  switch (dtype) {
    case DType::kFp32: static_cast<float*>(data)[index] = value; return;
    case DType::kBf16: static_cast<std::uint16_t*>(data)[index] = bf16_from_float(value); return;
    case DType::kFp16: static_cast<std::uint16_t*>(data)[index] = fp16_from_float(value); return;
  }
}

void check(const OrderedSum& sum) {
  SLUICE_CHECK(!sum.sources.empty(), "a sum has at least one source");
  SLUICE_CHECK(sum.target_type == sum.source_type || sum.target_type == DType::kFp32 ||
                   sum.source_type == DType::kFp32,
               "a sum does not convert between bf16 and fp16");
}

}  // namespace

void sum_in_order_reference(const OrderedSum& sum) {
  check(sum);
  const FloatEnvironment environment;
  for (std::uint64_t i = 0; i < sum.element_count; ++i) {
    float total = load(sum.source_type, sum.sources.front(), i);
    for (const void* source : sum.sources.subspan(1)) total += load(sum.source_type, source, i);
    store(sum.target_type, sum.target, i, total);
  }
}

void sum_in_order(const OrderedSum& sum) {
  check(sum);
  const FloatEnvironment environment;
  active_simd_kernels().sum_in_order(sum);
}

}  // namespace sluice
