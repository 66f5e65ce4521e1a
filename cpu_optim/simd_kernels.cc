// Compiled once per instruction set: foreach_target.h includes this file again for each set and
// defines HWY_TARGET. The last part, under HWY_ONCE, collects the results.

#include "cpu_optim/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_optim/simd_kernels.cc"  // NOLINT: Highway asks for a macro
#include <hwy/foreach_target.h>                         // must come before highway.h
#include <hwy/highway.h>

#include <array>
#include <cstdint>

#include "cpu_optim/gradient_ops.h"
#include "cpu_optim/simd_kernels.h"
#include "cpu_optim/simd_support.h"

// No function of another header may be defined between these two macros, because the linker could
// keep its AVX-512 copy for all callers.
HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {

// In simd_update.cc, which is compiled for the same instruction sets.
VectorResult update_adam(const AdamCoefficients& coefficients, const UpdateArrays& arrays);
VectorResult update_adam_l2(const AdamL2Coefficients& coefficients, const UpdateArrays& arrays);
VectorResult update_lion(const LionCoefficients& coefficients, const UpdateArrays& arrays);
VectorResult update_adagrad(const AdagradCoefficients& coefficients, const UpdateArrays& arrays);
VectorResult update_sgd(const SgdCoefficients& coefficients, const UpdateArrays& arrays);
VectorResult update_adam_bf16(const AdamCoefficients& coefficients, const UpdateArrays& arrays);
void move_bytes(const UpdateArrays& arrays, std::uint32_t seed);
std::uint64_t round_vectors(const FreshMoments& moments, const UpdateArrays& target,
                            RoundingWords words, std::uint32_t first_element);
// In simd_moments.cc.
std::uint64_t encode_code_groups(CodeBook book, const float* values, std::uint64_t element_count,
                                 const MomentCodes& moment);
std::uint64_t decode_code_groups(CodeBook book, const MomentCodes& moment,
                                 std::uint64_t element_count, float* values);
// In simd_sum.cc.
std::uint64_t sum_in_order(const OrderedSum& sum);

namespace {

#include "cpu_optim/simd_vectors.inc"

template <class Element>
void accumulate(DType dtype, void* target_bits, const void* source_bits,
                std::uint64_t element_count) {
  constexpr std::size_t kLanes = hn::MaxLanes(kFloats);
  auto* HWY_RESTRICT target = static_cast<Element*>(target_bits);
  const auto* HWY_RESTRICT source = static_cast<const Element*>(source_bits);
  std::size_t i = 0;
  for (; i + kLanes <= element_count; i += kLanes) {
    store_rounded(hn::Add(load_as_float(kFloats, target + i), load_as_float(kFloats, source + i)),
                  target + i);
  }
  accumulate_gradient_reference(dtype, target + i, source + i, element_count - i);
}

std::string_view accumulate_of_any_type(DType dtype, void* target, const void* source,
                                        std::uint64_t element_count) {
  switch (dtype) {
    case DType::kFp32: accumulate<float>(dtype, target, source, element_count); break;
    case DType::kBf16: accumulate<Bf16>(dtype, target, source, element_count); break;
    case DType::kFp16: accumulate<Fp16>(dtype, target, source, element_count); break;
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
  switch (dtype) {
    case DType::kFp32:
      add_leaves(dtype, static_cast<const float*>(gradient), element_count, total);
      break;
    case DType::kBf16:
      add_leaves(dtype, static_cast<const Bf16*>(gradient), element_count, total);
      break;
    case DType::kFp16:
      add_leaves(dtype, static_cast<const Fp16*>(gradient), element_count, total);
      break;
  }
  return kTargetName;
}

}  // namespace

// A constant and not a function: reading it executes no instruction of this target, so it is safe
// on a processor that lacks them.
extern constexpr SimdKernels kKernels = {HWY_TARGET,
                                         kTargetName,
                                         update_adam,
                                         update_adam_l2,
                                         update_lion,
                                         update_adagrad,
                                         update_sgd,
                                         SLUICE_UPDATES_BF16 ? update_adam_bf16 : nullptr,
                                         move_bytes,
                                         round_vectors,
                                         SLUICE_HAS_GATHER ? encode_code_groups : nullptr,
                                         SLUICE_HAS_LOOK_UP ? decode_code_groups : nullptr,
                                         accumulate_of_any_type,
                                         norm_of_any_type,
                                         sum_in_order};

}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice {

std::span<const SimdKernels> available_simd_kernels() {
  // Highway's own HWY_DYNAMIC_DISPATCH picks by a global of the whole process, which would force
  // other users of Highway too. So only its list of compiled targets, best first, is used here.
  struct List {
    std::array<SimdKernels, HWY_MAX_DYNAMIC_TARGETS + 1> kernels;
    std::size_t count = 0;
  };
  static const List list = [] {
    const SimdKernels* const compiled[] = {HWY_CHOOSE_TARGET_LIST(kKernels),
                                           HWY_CHOOSE_FALLBACK(kKernels)};
    const std::int64_t supported = supported_instruction_sets() | HWY_STATIC_TARGET;
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
