// Makes one optimizer step over arrays in host memory, in one fused pass. The pass reads the
// gradient, updates the moments and the master, writes the compute parameter, and detects values
// that are not finite. The call update_reference() applies the scalar definition
// (base/optimizer_math.h) in a loop. Tests compare the results of faster code with the results of
// update_reference(). The call update_simd() gives the same bits on every instruction set. Highway
// chooses the instruction set at run time. The results of both functions depend only on the
// arguments. Any thread may call the functions on disjoint memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <variant>

#include <sluice/dtype.h>
#include "base/moment_rounding.h"
#include "base/optimizer_math.h"
#include "cpu_optim/moment_codec.h"

namespace sluice {

// The layout in which the fp32 master weight is stored.
enum class MasterLayout : std::uint8_t {
  kFp32,       // `parameter` is the fp32 master itself
  kSplitBf16,  // `parameter` is the bf16 compute parameter, `low` is the 16-bit remainder
               // (base/optimizer_math.h)
  kFp16,       // `master` is fp32; `parameter` is `master` rounded to fp16, and is never read
};

// The coefficients of one step, for one of the optimizers. The type of the coefficients selects the
// optimizer. The *_coefficients() functions of base/optimizer_math.h make such coefficients without
// checks. The function coefficients_of() makes them with checks (optimizer_options.h).
using UpdateCoefficients = std::variant<AdamCoefficients, AdamL2Coefficients, LionCoefficients,
                                        AdagradCoefficients, SgdCoefficients>;

// The first function returns whether the optimizer keeps exp_avg. The second function returns
// whether the optimizer keeps exp_avg_sq. The momentum of Lion and SGD is stored as exp_avg. The
// sum of Adagrad is stored as exp_avg_sq.
bool keeps_exp_avg(const UpdateCoefficients& coefficients);
bool keeps_exp_avg_sq(const UpdateCoefficients& coefficients);

// A run of consecutive elements with the same hyperparameters. All arrays hold `element_count`
// elements and are updated in place. An array is null if the layout or the optimizer does not use
// the array. A moment is stored as fp32, bf16 or codes. Both moments have the same format. If the
// moments are codes, the run begins at the start of a group of its tensor. If the moments are bf16,
// `rounding` holds the position of the run in the tensor. Moments in bf16 or codes are converted to
// fp32, updated, and converted back. The weight is updated with the new fp32 moments, before these
// moments are converted back.
struct UpdateArrays {
  MasterLayout master_layout = MasterLayout::kFp32;
  DType gradient_dtype = DType::kFp32;
  void* parameter = nullptr;    // float[n] (kFp32), or uint16_t[n] of bf16 or fp16 bits
  std::int16_t* low = nullptr;  // only with kSplitBf16
  float* master = nullptr;      // only with kFp16
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  MomentCodes exp_avg_codes = {};
  MomentCodes exp_avg_sq_codes = {};
  std::uint16_t* exp_avg_bf16 = nullptr;
  std::uint16_t* exp_avg_sq_bf16 = nullptr;
  MomentRounding rounding = {};
  const void* gradient = nullptr;  // float[n], or uint16_t[n] of bf16 or fp16 bits
  std::uint64_t element_count = 0;

  bool has_codes() const { return exp_avg_codes.exist() || exp_avg_sq_codes.exist(); }
  bool has_bf16() const { return exp_avg_bf16 != nullptr || exp_avg_sq_bf16 != nullptr; }
  bool has_exp_avg() const {
    return exp_avg != nullptr || exp_avg_codes.exist() || exp_avg_bf16 != nullptr;
  }
  bool has_exp_avg_sq() const {
    return exp_avg_sq != nullptr || exp_avg_sq_codes.exist() || exp_avg_sq_bf16 != nullptr;
  }
};

// Returns the elements [begin, begin + count) of `arrays`. The result points into the memory of
// `arrays`.
UpdateArrays slice(const UpdateArrays& arrays, std::uint64_t begin, std::uint64_t count);

// The bytes that one update reads and writes per element. A byte that is both read and written
// counts in both numbers. The scales of codes are not counted. These scales take 4 bytes per 256
// elements.
struct UpdateBytes {
  std::uint64_t read = 0;
  std::uint64_t write = 0;
};
UpdateBytes bytes_per_element(const UpdateArrays& arrays);

// Returns the bits of the smallest magnitude at which a master counts as not finite. At this
// magnitude, either the master or the parameter that is rounded from the master is infinite.
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

// Says whether all new values are finite. These values are the masters, the compute parameters
// rounded from the masters, and the moments. A moment may overflow while the master stays finite.
// For example, if exp_avg_sq is infinite, the parameter never moves again, because the step is
// divided by the root of exp_avg_sq.
enum class NewState : std::uint8_t { kFinite, kNonFinite };

// Both functions round to nearest and do not flush denormals. Both functions ignore the caller's
// floating-point settings and do not change the settings. The arrays do not overlap, and each array
// is aligned at least for its element type. Both functions give equal bits for every result that is
// not NaN. A NaN result may have any sign and payload.
NewState update_reference(const UpdateCoefficients& coefficients, const UpdateArrays& arrays);
NewState update_simd(const UpdateCoefficients& coefficients, const UpdateArrays& arrays);

// The place of a value that is not finite.
struct NonFiniteState {
  std::uint64_t element = 0;
  std::string_view part;
};
// Finds the first element with a value that is not finite. The result also names this value. The
// name is "weight", "exp_avg" or "exp_avg_sq". "weight" stands for the master, or for the parameter
// that is rounded from the master. If all values are finite, the result has the element number
// `element_count`. The function may be slow, because only the message about NewState::kNonFinite
// needs it.
NonFiniteState find_non_finite_state(const UpdateArrays& arrays);

// The function reads and writes the same bytes as update_simd(). The streams, the order and the
// instruction set are also the same. No byte changes, except that parameters of kFp16 become zero.
// No update can be faster than this function, so the speed of this function is an upper limit.
// `seed` must be 0, but the compiler must not know this value.
void move_like_update(const UpdateArrays& arrays, std::uint32_t seed);

// Returns the name of the instruction set that update_simd() and gradient_ops.h use on this
// processor. On x86, the name is AVX3 (AVX-512), AVX2, SSE4 or SCALAR. The environment
// variable SLUICE_SIMD can force one of these instruction sets. The variable's value is the name in
// upper or lower case. The variable is read once. Fails with kConfig if SLUICE_SIMD names an
// instruction set that this build or this processor lacks. With such a name, update_simd() and the
// functions of gradient_ops.h fail, too. So a program should call simd_target_name() when it
// starts.
std::string_view simd_target_name();

}  // namespace sluice
