// One optimizer step over host memory, in one fused pass: read the gradient, update moments and
// master, write the compute parameter, and notice values that are no longer finite.
// update_reference() applies the scalar definition (base/optimizer_math.h) in a loop and is the
// oracle in tests; update_simd() gives the same bits on every instruction set (Highway, chosen at
// run time). Both are pure in their arguments: callable from any thread on disjoint memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <variant>

#include <sluice/dtype.h>
#include "base/optimizer_math.h"

namespace sluice {

// The way the fp32 master weight is kept.
enum class MasterLayout : std::uint8_t {
  kFp32,       // `parameter` is the fp32 master itself
  kSplitBf16,  // `parameter` is the bf16 compute parameter, `low` the 16-bit remainder
               // (base/optimizer_math.h)
  kFp16,       // `master` is fp32; `parameter` is its rounding to fp16, written and never read
};

// The coefficients of one step; the alternative says which optimizer. Made by *_coefficients() of
// base/optimizer_math.h, or with checks by coefficients_of() (optimizer_options.h).
using UpdateCoefficients = std::variant<AdamCoefficients, AdamL2Coefficients, LionCoefficients,
                                        AdagradCoefficients, SgdCoefficients>;

// Whether an optimizer keeps exp_avg (also the momentum of Lion and SGD) and exp_avg_sq (also the
// sum of Adagrad).
bool keeps_exp_avg(const UpdateCoefficients& coefficients);
bool keeps_exp_avg_sq(const UpdateCoefficients& coefficients);

// A run of elements that share hyperparameters. All arrays hold `element_count` elements and are
// updated in place; arrays that the layout or the optimizer does not use are null.
struct UpdateArrays {
  MasterLayout master_layout = MasterLayout::kFp32;
  DType gradient_dtype = DType::kFp32;
  void* parameter = nullptr;    // float[n] (kFp32), or uint16_t[n] of bf16 or fp16 bits
  std::int16_t* low = nullptr;  // only with kSplitBf16
  float* master = nullptr;      // only with kFp16
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  const void* gradient = nullptr;  // float[n], or uint16_t[n] of bf16 or fp16 bits
  std::uint64_t element_count = 0;
};

// Elements [begin, begin + count) of `arrays`: views of the same memory, valid as long as it is.
UpdateArrays slice(const UpdateArrays& arrays, std::uint64_t begin, std::uint64_t count);

// Bytes that a step reads and writes per element, each byte counted once.
struct UpdateBytes {
  std::uint64_t read = 0;
  std::uint64_t write = 0;
};
UpdateBytes bytes_per_element(const UpdateArrays& arrays);

// A master whose magnitude, as bits, is at least this is not finite, or its parameter is not.
constexpr std::uint32_t non_finite_magnitude(MasterLayout layout) {
  switch (layout) {
    case MasterLayout::kFp32: return 0x7f800000;
    case MasterLayout::kSplitBf16: return 0x7f7f8000;
    case MasterLayout::kFp16: return 0x477ff000;  // 65520
  }
  return 0;
}
inline bool is_finite_master(MasterLayout layout, float master) {
  return (bits_from_float(master) & 0x7fffffffu) < non_finite_magnitude(layout);
}

// Whether all new values are finite: the masters, the compute parameters rounded from them, and the
// moments. A moment may overflow where the master does not show it: a parameter whose exp_avg_sq is
// infinite never moves again, because its step is divided by it.
enum class NewState : std::uint8_t { kFinite, kNonFinite };

// Both run under round-to-nearest and without flushing denormals, whatever the caller has set, and
// leave the caller's setting as it was. The arrays do not overlap; each is aligned at least to its
// element. The bits are equal for every result that is not NaN; a NaN comes out as a NaN of any
// sign and payload.
NewState update_reference(const UpdateCoefficients& coefficients, const UpdateArrays& arrays);
NewState update_simd(const UpdateCoefficients& coefficients, const UpdateArrays& arrays);

// The first element with a value that is not finite, and which value: "weight" (the master, or the
// parameter rounded from it), "exp_avg" or "exp_avg_sq". Returns element `element_count` if there
// is none. Explains NewState::kNonFinite in a message, so its speed does not matter.
struct NonFiniteState {
  std::uint64_t element = 0;
  std::string_view part;
};
NonFiniteState find_non_finite_state(const UpdateArrays& arrays);

// Reads and writes the same bytes as update_simd(), in the same streams, the same order and with
// the same instruction set. It leaves every byte as it was, except kFp16's parameters, which become
// zero. No update can be faster, so its speed is the limit. `seed` is 0, but the compiler must not
// know that.
void move_like_update(const UpdateArrays& arrays, std::uint32_t seed);

// The instruction set that update_simd() and gradient_ops.h use here: AVX3 (AVX-512), AVX2, SSE4,
// SSSE3 or SCALAR on x86. SLUICE_SIMD=name in the environment, in upper or lower case, forces one;
// it is read once.
// Fails with: kConfig when SLUICE_SIMD names none that this build and this processor have.
// update_simd() and the functions like it then fail as well, so call this first, at the start.
std::string_view simd_target_name();

}  // namespace sluice
