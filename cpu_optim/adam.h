// Adam and AdamW over host memory, one fused pass: read the gradient, update moments and master,
// write the compute parameter. adam_reference() is the scalar definition applied in a loop and the
// oracle in tests; adam_simd() gives the same bits on every instruction set (Highway, chosen at run
// time). Both are pure in their arguments: callable from any thread on disjoint memory.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/dtype.h"
#include "base/optimizer_math.h"

namespace sluice {

// How the fp32 master weight is kept.
enum class MasterLayout : std::uint8_t {
  kFp32,       // `parameter` is the fp32 master itself; `low` is null
  kSplitBf16,  // `parameter` is the bf16 compute parameter, `low` the 16-bit remainder
               // (base/optimizer_math.h)
};

// A run of elements that share hyperparameters. All arrays hold `element_count` elements and are
// updated in place.
struct AdamArrays {
  MasterLayout master_layout = MasterLayout::kFp32;
  DType gradient_dtype = DType::kFp32;  // kFp32 or kBf16
  void* parameter = nullptr;            // float[n] (kFp32) or uint16_t[n] of bf16 bits (kSplitBf16)
  std::int16_t* low = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  const void* gradient = nullptr;  // float[n] or uint16_t[n] of bf16 bits
  std::uint64_t element_count = 0;
};

// Elements [begin, begin + count) of `arrays`: views of the same memory, valid as long as it is.
AdamArrays slice(const AdamArrays& arrays, std::uint64_t begin, std::uint64_t count);

// Both run under round-to-nearest without flushing of denormals, whatever the caller has set, and
// leave the caller's setting as it was. The arrays do not overlap; each is aligned to its element
// at least. Equal bits hold for every result that is not NaN; a NaN comes out as a NaN, of any sign
// and payload.
void adam_reference(const AdamCoefficients& coefficients, const AdamArrays& arrays);
void adam_simd(const AdamCoefficients& coefficients, const AdamArrays& arrays);

// The instruction set that adam_simd() and gradient_ops.h use here: AVX3 (AVX-512), AVX2, SSE4,
// SSSE3 or SCALAR on x86. SLUICE_SIMD=name in the environment, in any case, forces one; it is read
// once.
// Fails with: kConfig when SLUICE_SIMD names none that this build and this processor have;
// adam_simd() and its siblings then fail alike, so ask here first, at start.
std::string_view simd_target_name();

}  // namespace sluice
