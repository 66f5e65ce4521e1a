// One step of an optimizer over host memory, in one fused pass: read the gradient, update moments
// and master, write the compute parameter, notice what is no longer finite.
// update_reference() is the scalar definition (base/optimizer_math.h) applied in a loop and the
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

// How the fp32 master weight is kept.
enum class MasterLayout : std::uint8_t {
  kFp32,       // `parameter` is the fp32 master itself
  kSplitBf16,  // `parameter` is the bf16 compute parameter, `low` the 16-bit remainder
               // (base/optimizer_math.h)
  kFp16,       // `master` is fp32; `parameter` is its rounding to fp16, written and never read
};

// One step's numbers; the alternative says which optimizer it is. Made by *_coefficients() of
// base/optimizer_math.h, or with checks by coefficients_of() (optimizer_options.h).
using UpdateCoefficients = std::variant<AdamCoefficients, AdamL2Coefficients, LionCoefficients,
                                        AdagradCoefficients, SgdCoefficients>;

// Whether an optimizer keeps exp_avg (Lion's and SGD's momentum too) and exp_avg_sq (Adagrad's sum
// too).
bool keeps_exp_avg(const UpdateCoefficients& coefficients);
bool keeps_exp_avg_sq(const UpdateCoefficients& coefficients);

// A run of elements that share hyperparameters. All arrays hold `element_count` elements and are
// updated in place; those that layout and optimizer have no use for are null.
struct UpdateArrays {
  MasterLayout master_layout = MasterLayout::kFp32;
  DType gradient_dtype = DType::kFp32;
  void* parameter = nullptr;    // float[n] (kFp32), or uint16_t[n] of bf16 or fp16 bits
  std::int16_t* low = nullptr;  // kSplitBf16 alone
  float* master = nullptr;      // kFp16 alone
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  const void* gradient = nullptr;  // float[n], or uint16_t[n] of bf16 or fp16 bits
  std::uint64_t element_count = 0;
};

// Elements [begin, begin + count) of `arrays`: views of the same memory, valid as long as it is.
UpdateArrays slice(const UpdateArrays& arrays, std::uint64_t begin, std::uint64_t count);

// Bytes of one element that a step reads and writes, counted once each.
struct UpdateBytes {
  std::uint64_t read = 0;
  std::uint64_t write = 0;
};
UpdateBytes bytes_per_element(const UpdateArrays& arrays);

// From this magnitude on, as bits, a master or the parameter rounded from it is not finite.
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

// Whether every new master is finite, as is the compute parameter that was rounded from it, and
// every new moment. A moment may overflow where the master does not show it: what is divided by an
// infinite exp_avg_sq never moves again.
enum class NewState : std::uint8_t { kFinite, kNonFinite };

// Both run under round-to-nearest without flushing of denormals, whatever the caller has set, and
// leave the caller's setting as it was. The arrays do not overlap; each is aligned to its element
// at least. Equal bits hold for every result that is not NaN; a NaN comes out as a NaN, of any sign
// and payload.
NewState update_reference(const UpdateCoefficients& coefficients, const UpdateArrays& arrays);
NewState update_simd(const UpdateCoefficients& coefficients, const UpdateArrays& arrays);

// The first element of which something is not finite, and what: "weight" (the master, or the
// parameter rounded from it), "exp_avg" or "exp_avg_sq". Element element_count if there is none.
// For the message behind NewState::kNonFinite, so speed does not matter.
struct NonFiniteState {
  std::uint64_t element = 0;
  std::string_view part;
};
NonFiniteState find_non_finite_state(const UpdateArrays& arrays);

// Reads and writes the bytes that update_simd() does, in the same streams, the same order and with
// the same instruction set, and leaves every one of them as it was but kFp16's parameters, which
// become zero. The yardstick for the update's speed: no update can be faster. `seed` is 0; the
// compiler must not know that.
void move_like_update(const UpdateArrays& arrays, std::uint32_t seed);

// The instruction set that update_simd() and gradient_ops.h use here: AVX3 (AVX-512), AVX2, SSE4,
// SSSE3 or SCALAR on x86. SLUICE_SIMD=name in the environment, in any case, forces one; it is read
// once.
// Fails with: kConfig when SLUICE_SIMD names none that this build and this processor have;
// update_simd() and its siblings then fail alike, so ask here first, at start.
std::string_view simd_target_name();

}  // namespace sluice
