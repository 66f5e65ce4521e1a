#include "cpu_optim/adam.h"

#include "base/error.h"
#include "cpu_optim/float_environment.h"
#include "cpu_optim/simd_kernels.h"

namespace sluice {
namespace {

void check(const AdamArrays& arrays) {
  SLUICE_CHECK(arrays.gradient_dtype == DType::kFp32 || arrays.gradient_dtype == DType::kBf16,
               "Adam takes fp32 or bf16 gradients");
  if (arrays.element_count == 0) return;
  SLUICE_CHECK(arrays.parameter != nullptr && arrays.exp_avg != nullptr &&
                   arrays.exp_avg_sq != nullptr && arrays.gradient != nullptr,
               "Adam needs parameter, exp_avg, exp_avg_sq and gradient");
  SLUICE_CHECK((arrays.low != nullptr) == (arrays.master_layout == MasterLayout::kSplitBf16),
               "`low` belongs to the split master, and only to it");
}

float gradient_at(const AdamArrays& arrays, std::uint64_t i) {
  if (arrays.gradient_dtype == DType::kFp32) return static_cast<const float*>(arrays.gradient)[i];
  return float_from_bf16(static_cast<const std::uint16_t*>(arrays.gradient)[i]);
}

}  // namespace

AdamArrays slice(const AdamArrays& arrays, std::uint64_t begin, std::uint64_t count) {
  SLUICE_CHECK(begin <= arrays.element_count && count <= arrays.element_count - begin,
               "a slice lies inside its arrays");
  const std::uint64_t parameter_bytes = arrays.master_layout == MasterLayout::kFp32 ? 4 : 2;
  AdamArrays part = arrays;
  part.parameter = static_cast<std::byte*>(arrays.parameter) + begin * parameter_bytes;
  part.low = arrays.low == nullptr ? nullptr : arrays.low + begin;
  part.exp_avg = arrays.exp_avg + begin;
  part.exp_avg_sq = arrays.exp_avg_sq + begin;
  part.gradient =
      static_cast<const std::byte*>(arrays.gradient) + begin * size_of(arrays.gradient_dtype);
  part.element_count = count;
  return part;
}

void adam_reference(const AdamCoefficients& coefficients, const AdamArrays& arrays) {
  check(arrays);
  const FloatEnvironment environment;
  const bool split = arrays.master_layout == MasterLayout::kSplitBf16;
  auto* const fp32 = static_cast<float*>(arrays.parameter);
  auto* const high = static_cast<std::uint16_t*>(arrays.parameter);
  for (std::uint64_t i = 0; i < arrays.element_count; ++i) {
    const float master = split ? join_master({high[i], arrays.low[i]}) : fp32[i];
    const AdamElement updated = adam_element(
        coefficients, {master, arrays.exp_avg[i], arrays.exp_avg_sq[i]}, gradient_at(arrays, i));
    arrays.exp_avg[i] = updated.exp_avg;
    arrays.exp_avg_sq[i] = updated.exp_avg_sq;
    if (split) {
      const SplitMaster halves = split_master(updated.master);
      high[i] = halves.high;
      arrays.low[i] = halves.low;
    } else {
      fp32[i] = updated.master;
    }
  }
}

void adam_simd(const AdamCoefficients& coefficients, const AdamArrays& arrays) {
  check(arrays);
  const FloatEnvironment environment;
  active_simd_kernels().adam(coefficients, arrays);
}

}  // namespace sluice
