// Moments in 8-bit codes (base/moment_codes.h), in vectors. Compiled once per instruction set, as
// simd_kernels.cc explains.
#include "cpu_optim/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_optim/simd_moments.cc"  // NOLINT: Highway asks for a macro
#include <hwy/foreach_target.h>                         // must come before highway.h
#include <hwy/highway.h>

#include <cstdint>

#include "cpu_optim/moment_codec.h"
#include "cpu_optim/simd_kernels.h"

// No function of another header may be defined or instantiated between these two macros, because
// the linker could keep its AVX-512 copy for all callers.
HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

#include "cpu_optim/simd_vectors.inc"

using SignedBits = hn::RebindToSigned<Floats>;
using SignedBitsVector = hn::Vec<SignedBits>;
using Bytes = hn::Rebind<std::uint8_t, Floats>;
constexpr SignedBits kSignedBits;
constexpr Bytes kBytes;
constexpr std::size_t kLanes = hn::MaxLanes(kFloats);

#if SLUICE_HAS_LOOK_UP
// table[indices] by the lower bits of the indices, for a table of kCount numbers. A permutation
// takes one of 32 numbers. Eight of them, and seven choices by the upper bits, are quicker than
// loading each number.
template <std::size_t kCount>
HWY_INLINE FloatVector look_up_part(const float* HWY_RESTRICT table, SignedBitsVector indices) {
  if constexpr (kCount == 32) {
    return FloatVector{_mm512_permutex2var_ps(hn::Load(kFloats, table).raw, indices.raw,
                                              hn::Load(kFloats, table + 16).raw)};
  } else {
    const auto upper = hn::Set(kSignedBits, static_cast<std::int32_t>(kCount / 2));
    return hn::IfThenElse(hn::RebindMask(kFloats, hn::TestBit(indices, upper)),
                          look_up_part<kCount / 2>(table + kCount / 2, indices),
                          look_up_part<kCount / 2>(table, indices));
  }
}
#endif

// table[indices], for a table of 256 numbers.
HWY_INLINE FloatVector look_up(const float* HWY_RESTRICT table, SignedBitsVector indices) {
#if SLUICE_HAS_LOOK_UP
  return look_up_part<256>(table, indices);
#else
  return hn::GatherIndex(kFloats, table, indices);
#endif
}

// The number of codes above that of zero, or one less. `magnitude` is at most 1. Between two powers
// of ten, codes are equally far apart, so that a straight line counts them. Halfway between two
// codes, the line is 0.3 below the next number, or 0.1 at the first code above a power of ten.
// So no rounding of the line makes it count too many.
HWY_INLINE SignedBitsVector codes_below(const CodeLines& lines, FloatVector magnitude) {
  FloatVector slope = hn::Set(kFloats, lines.slopes[0]);
  FloatVector offset = hn::Set(kFloats, lines.offsets[0]);
  for (std::size_t i = 1; i < CodeLines::kCount; ++i) {
    const auto is_above = hn::Ge(magnitude, hn::Set(kFloats, lines.begins[i]));
    slope = hn::IfThenElse(is_above, hn::Set(kFloats, lines.slopes[i]), slope);
    offset = hn::IfThenElse(is_above, hn::Set(kFloats, lines.offsets[i]), offset);
  }
  return hn::ConvertTo(kSignedBits, hn::Add(hn::Mul(magnitude, slope), offset));
}

template <CodeBook kBook>
HWY_INLINE SignedBitsVector nearest_codes(const CodeKernelTable& table, FloatVector ratios) {
  SignedBitsVector code = codes_below(table.lines, hn::Abs(ratios));
  if constexpr (kBook == CodeBook::kSigned) {
    const auto zero = hn::Set(kSignedBits, zero_code(CodeBook::kSigned));
    const auto is_negative = hn::Lt(hn::BitCast(kSignedBits, ratios), hn::Zero(kSignedBits));
    // The lowest code is -0.993, and there is none for -1.
    const auto below =
        hn::Max(hn::Sub(hn::Sub(zero, hn::Set(kSignedBits, 1)), code), hn::Zero(kSignedBits));
    code = hn::IfThenElse(is_negative, below, hn::Add(zero, code));
  }
  // A comparison that is true is -1.
  const auto is_next = hn::VecFromMask(
      kSignedBits, hn::RebindMask(kSignedBits, hn::Gt(ratios, look_up(table.limits, code))));
  return hn::Sub(code, is_next);
}

template <CodeBook kBook>
void encode_group(const CodeKernelTable& table, const float* HWY_RESTRICT values,
                  std::uint8_t* HWY_RESTRICT codes, float scale) {
  const FloatVector divisor = hn::Set(kFloats, scale);
  for (std::size_t i = 0; i < kMomentGroupElements; i += kLanes) {
    const FloatVector ratios = hn::Div(hn::LoadU(kFloats, values + i), divisor);
    const SignedBitsVector found = nearest_codes<kBook>(table, ratios);
    hn::StoreU(hn::TruncateTo(kBytes, hn::BitCast(kBits, found)), kBytes, codes + i);
  }
}

// The largest magnitude of a group.
HWY_INLINE float largest_of(const float* HWY_RESTRICT values) {
  BitsVector largest = hn::Zero(kBits);
  const auto magnitude = hn::Set(kBits, 0x7fffffff);
  for (std::size_t i = 0; i < kMomentGroupElements; i += kLanes)
    largest =
        hn::Max(largest, hn::And(hn::BitCast(kBits, hn::LoadU(kFloats, values + i)), magnitude));
  const std::uint32_t bits = hn::GetLane(hn::MaxOfLanes(kBits, largest));
  return __builtin_bit_cast(float, bits);
}

}  // namespace

// Groups whose scale is 0 or not finite are left to the definition.
std::uint64_t encode_code_groups(CodeBook book, const float* values, std::uint64_t element_count,
                                 const MomentCodes& moment) {
  const CodeKernelTable& table = code_kernel_table(book);
  std::uint64_t done = 0;
  for (; done + kMomentGroupElements <= element_count; done += kMomentGroupElements) {
    const float scale = largest_of(values + done);
    if (!(scale > 0 && scale <= 0x1.fffffep127f)) return done;
    moment.scales[done / kMomentGroupElements] = scale;
    std::uint8_t* const codes = moment.codes + done;
    if (book == CodeBook::kSigned) {
      encode_group<CodeBook::kSigned>(table, values + done, codes, scale);
    } else {
      encode_group<CodeBook::kUnsigned>(table, values + done, codes, scale);
    }
  }
  return done;
}

std::uint64_t decode_code_groups(CodeBook book, const MomentCodes& moment,
                                 std::uint64_t element_count, float* HWY_RESTRICT values) {
  const CodeKernelTable& table = code_kernel_table(book);
  std::uint64_t done = 0;
  for (; done + kMomentGroupElements <= element_count; done += kMomentGroupElements) {
    const FloatVector scale = hn::Set(kFloats, moment.scales[done / kMomentGroupElements]);
    for (std::uint64_t i = done; i < done + kMomentGroupElements; i += kLanes) {
      const auto codes = hn::PromoteTo(kSignedBits, hn::LoadU(kBytes, moment.codes + i));
      hn::StoreU(hn::Mul(look_up(table.values, codes), scale), kFloats, values + i);
    }
  }
  return done;
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();
