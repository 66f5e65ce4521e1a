// Compiled once per instruction set: foreach_target.h includes this file again for each of them and
// sets HWY_TARGET, and the last part, under HWY_ONCE, collects the results.

// Vectors whose length is known only at run time cannot be kept in structs and arrays as below.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_optim/simd_kernels.cc"  // NOLINT: Highway asks for a macro
#include <hwy/foreach_target.h>                         // must come before highway.h
#include <hwy/highway.h>

#include <array>
#include <cstdint>

#include "cpu_optim/gradient_ops.h"
#include "cpu_optim/simd_kernels.h"

// No function of another header may be defined between these two macros: the linker could keep its
// AVX-512 copy for all.
HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr std::string_view kTargetName = std::string_view(HWY_STR(HWY_NAMESPACE)).substr(2);

// One group of elements, as fp32, as bits, and as the 16-bit halves in memory.
using Floats = hn::ScalableTag<float>;
using Bits = hn::RebindToUnsigned<Floats>;
using SignedBits = hn::RebindToSigned<Floats>;
using Halves = hn::Rebind<std::uint16_t, Floats>;
using SignedHalves = hn::Rebind<std::int16_t, Floats>;
using FloatVector = hn::Vec<Floats>;
using BitsVector = hn::Vec<Bits>;

constexpr Floats kFloats;
constexpr Bits kBits;
constexpr SignedBits kSignedBits;
constexpr Halves kHalves;
constexpr SignedHalves kSignedHalves;

// bf16 to fp32 is a shift, on a group as wide as `Tag`.
template <class Tag>
HWY_INLINE hn::Vec<Tag> load_as_float(Tag tag, const float* source) {
  return hn::LoadU(tag, source);
}
template <class Tag>
HWY_INLINE hn::Vec<Tag> load_as_float(Tag tag, const std::uint16_t* source) {
  const hn::RebindToUnsigned<Tag> bits;
  const hn::Rebind<std::uint16_t, Tag> halves;
  return hn::BitCast(tag, hn::ShiftLeft<16>(hn::PromoteTo(bits, hn::LoadU(halves, source))));
}

HWY_INLINE void store_rounded(FloatVector value, float* target) {
  hn::StoreU(value, kFloats, target);
}
// bf16_from_float() of a sum of two bf16 values: nearest, ties to even. If it is a NaN, then a
// quiet one whose low half is zero, so that rounding leaves it alone.
HWY_INLINE void store_rounded(FloatVector value, std::uint16_t* target) {
  const BitsVector bits = hn::BitCast(kBits, value);
  const BitsVector odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(kBits, 1));
  const BitsVector rounded = hn::Add(bits, hn::Add(odd, hn::Set(kBits, 0x7fff)));
  hn::StoreU(hn::TruncateTo(kHalves, hn::ShiftRight<16>(rounded)), kHalves, target);
}

// The two master layouts: a group of masters from memory and back.
struct Fp32Master {
  explicit Fp32Master(const AdamArrays& arrays) : master(static_cast<float*>(arrays.parameter)) {}
  HWY_INLINE FloatVector load(std::size_t i) const { return hn::LoadU(kFloats, master + i); }
  HWY_INLINE void store(FloatVector value, std::size_t i) const {
    hn::StoreU(value, kFloats, master + i);
  }

  float* HWY_RESTRICT master;
};

struct SplitMasterHalves {
  explicit SplitMasterHalves(const AdamArrays& arrays)
      : high(static_cast<std::uint16_t*>(arrays.parameter)), low(arrays.low) {}

  // join_master(). A NaN needs no case of its own: its `high` is at least 0x7f81 in magnitude, and
  // 0x7f81'0000 - 0x8000 still lies above infinity. Only the payload differs.
  HWY_INLINE FloatVector load(std::size_t i) const {
    const BitsVector rounded = hn::BitCast(kBits, load_as_float(kFloats, high + i));
    const auto remainder = hn::PromoteTo(kSignedBits, hn::LoadU(kSignedHalves, low + i));
    return hn::BitCast(kFloats, hn::Add(rounded, hn::BitCast(kBits, remainder)));
  }

  // split_master(): half away from zero in magnitude, so adding 0x8000 carries into `high`. In a
  // NaN it could carry into the sign; here it is always a quiet one, being a result of arithmetic.
  HWY_INLINE void store(FloatVector value, std::size_t i) const {
    const BitsVector bits = hn::BitCast(kBits, value);
    const BitsVector rounded = hn::Add(bits, hn::Set(kBits, 0x8000));
    const auto is_nan = hn::RebindMask(kBits, hn::IsNaN(value));
    const BitsVector top = hn::ShiftRight<16>(hn::IfThenElse(is_nan, bits, rounded));
    hn::StoreU(hn::TruncateTo(kHalves, top), kHalves, high + i);
    hn::StoreU(hn::BitCast(kSignedHalves, hn::TruncateTo(kHalves, bits)), kSignedHalves, low + i);
  }

  std::uint16_t* HWY_RESTRICT high;
  std::int16_t* HWY_RESTRICT low;
};

// adam_element() on a group. Mul and Add stay apart: MulAdd would round once where the definition
// rounds twice. Plain stores in place beat streaming ones, because the lines have just been read.
template <class Master, class Gradient>
void adam(const AdamCoefficients& c, const AdamArrays& arrays) {
  const Master master(arrays);
  const auto* HWY_RESTRICT gradient = static_cast<const Gradient*>(arrays.gradient);
  float* HWY_RESTRICT exp_avg = arrays.exp_avg;
  float* HWY_RESTRICT exp_avg_sq = arrays.exp_avg_sq;
  const FloatVector gradient_scale = hn::Set(kFloats, c.gradient_scale);
  const FloatVector beta1 = hn::Set(kFloats, c.beta1);
  const FloatVector one_minus_beta1 = hn::Set(kFloats, c.one_minus_beta1);
  const FloatVector beta2 = hn::Set(kFloats, c.beta2);
  const FloatVector one_minus_beta2 = hn::Set(kFloats, c.one_minus_beta2);
  const FloatVector inverse_correction = hn::Set(kFloats, c.inverse_sqrt_correction2);
  const FloatVector epsilon = hn::Set(kFloats, c.epsilon);
  const FloatVector decay_factor = hn::Set(kFloats, c.decay_factor);
  const FloatVector step_size = hn::Set(kFloats, c.step_size);
  constexpr std::size_t kLanes = hn::MaxLanes(kFloats);
  const std::uint64_t element_count = arrays.element_count;  // stores cannot change a local
  std::uint64_t i = 0;
  for (; i + kLanes <= element_count; i += kLanes) {
    const FloatVector g = hn::Mul(load_as_float(kFloats, gradient + i), gradient_scale);
    const FloatVector m =
        hn::Add(hn::Mul(beta1, hn::LoadU(kFloats, exp_avg + i)), hn::Mul(one_minus_beta1, g));
    const FloatVector v = hn::Add(hn::Mul(beta2, hn::LoadU(kFloats, exp_avg_sq + i)),
                                  hn::Mul(hn::Mul(one_minus_beta2, g), g));
    const FloatVector denominator = hn::Add(hn::Mul(hn::Sqrt(v), inverse_correction), epsilon);
    const FloatVector p =
        hn::Sub(hn::Mul(master.load(i), decay_factor), hn::Mul(step_size, hn::Div(m, denominator)));
    hn::StoreU(m, kFloats, exp_avg + i);
    hn::StoreU(v, kFloats, exp_avg_sq + i);
    master.store(p, i);
  }
  if (i != element_count) adam_reference(c, slice(arrays, i, element_count - i));
}

std::string_view adam_of_any_type(const AdamCoefficients& c, const AdamArrays& arrays) {
  const bool fp32_gradient = arrays.gradient_dtype == DType::kFp32;
  if (arrays.master_layout == MasterLayout::kFp32) {
    fp32_gradient ? adam<Fp32Master, float>(c, arrays) : adam<Fp32Master, std::uint16_t>(c, arrays);
  } else {
    fp32_gradient ? adam<SplitMasterHalves, float>(c, arrays)
                  : adam<SplitMasterHalves, std::uint16_t>(c, arrays);
  }
  return kTargetName;
}

template <class Element>
void accumulate(DType dtype, Element* HWY_RESTRICT target, const Element* HWY_RESTRICT source,
                std::uint64_t element_count) {
  constexpr std::size_t kLanes = hn::MaxLanes(kFloats);
  std::size_t i = 0;
  for (; i + kLanes <= element_count; i += kLanes) {
    store_rounded(hn::Add(load_as_float(kFloats, target + i), load_as_float(kFloats, source + i)),
                  target + i);
  }
  accumulate_gradient_reference(dtype, target + i, source + i, element_count - i);
}

std::string_view accumulate_of_any_type(DType dtype, void* target, const void* source,
                                        std::uint64_t element_count) {
  if (dtype == DType::kFp32) {
    accumulate(dtype, static_cast<float*>(target), static_cast<const float*>(source),
               element_count);
  } else {
    accumulate(dtype, static_cast<std::uint16_t*>(target),
               static_cast<const std::uint16_t*>(source), element_count);
  }
  return kTargetName;
}

// Whole leaves in vectors: the eight lanes of the definition lie in one to eight registers, and the
// tree over them is scalar. Squares of fp32 values are exact in fp64.
template <class Element>
void add_leaves(DType dtype, const Element* gradient, std::uint64_t element_count,
                NormAccumulator& total) {
  using Doubles = hn::CappedTag<double, 8>;
  constexpr Doubles kDoubles;
  constexpr hn::Rebind<float, Doubles> kNarrow;
  constexpr std::size_t kLanes = hn::MaxLanes(kDoubles);
  constexpr std::size_t kRegisters = 8 / kLanes;
  std::size_t begin = 0;
  for (; begin + kNormLeafElements <= element_count; begin += kNormLeafElements) {
    hn::Vec<Doubles> sums[kRegisters];
    for (auto& sum : sums) sum = hn::Zero(kDoubles);
    for (std::size_t i = begin; i < begin + kNormLeafElements; i += 8) {
      for (std::size_t r = 0; r < kRegisters; ++r) {
        const auto value =
            hn::PromoteTo(kDoubles, load_as_float(kNarrow, gradient + i + r * kLanes));
        sums[r] = hn::Add(sums[r], hn::Mul(value, value));
      }
    }
    double lane[8];
    for (std::size_t r = 0; r < kRegisters; ++r) hn::StoreU(sums[r], kDoubles, lane + r * kLanes);
    total.add(((lane[0] + lane[4]) + (lane[2] + lane[6])) +
              ((lane[1] + lane[5]) + (lane[3] + lane[7])));
  }
  add_squared_norm_reference(dtype, gradient + begin, element_count - begin, total);
}

std::string_view norm_of_any_type(DType dtype, const void* gradient, std::uint64_t element_count,
                                  NormAccumulator& total) {
  if (dtype == DType::kFp32) {
    add_leaves(dtype, static_cast<const float*>(gradient), element_count, total);
  } else {
    add_leaves(dtype, static_cast<const std::uint16_t*>(gradient), element_count, total);
  }
  return kTargetName;
}

}  // namespace

// A constant and no function: reading it executes no instruction of this target, so that it is safe
// on a processor that lacks them.
extern constexpr SimdKernels kKernels = {HWY_TARGET, kTargetName, adam_of_any_type,
                                         accumulate_of_any_type, norm_of_any_type};

}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice {

std::span<const SimdKernels> available_simd_kernels() {
  // Highway's own HWY_DYNAMIC_DISPATCH picks by a global of the whole process, which would force
  // other users of Highway too; only its list of compiled targets, best first, is used here.
  struct List {
    std::array<SimdKernels, HWY_MAX_DYNAMIC_TARGETS + 1> kernels;
    std::size_t count = 0;
  };
  static const List list = [] {
    const SimdKernels* const compiled[] = {HWY_CHOOSE_TARGET_LIST(kKernels),
                                           HWY_CHOOSE_FALLBACK(kKernels)};
    const std::int64_t supported = hwy::SupportedTargets() | HWY_STATIC_TARGET;
    List found;
    std::int64_t seen = 0;  // without a fallback in the build the static target is listed twice
    for (const SimdKernels* kernels : compiled) {
      if (kernels == nullptr || (kernels->highway_target & supported & ~seen) == 0) continue;
      seen |= kernels->highway_target;
      found.kernels[found.count++] = *kernels;
    }
    return found;
  }();
  return {list.kernels.data(), list.count};
}

}  // namespace sluice
#endif  // HWY_ONCE
