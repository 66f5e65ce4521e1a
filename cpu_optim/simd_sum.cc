// Sums over ranks in vectors. Compiled once per instruction set, as simd_kernels.cc explains.
#include "cpu_optim/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_optim/simd_sum.cc"  // NOLINT: Highway asks for a macro
#include <hwy/foreach_target.h>                     // must come before highway.h
#include <hwy/highway.h>

#include <cstdint>

#include "cpu_optim/rank_sum.h"
#include "cpu_optim/simd_kernels.h"

// No function of another header may be defined or instantiated between these two macros, because
// the linker could keep its AVX-512 copy for all callers.
HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

#include "cpu_optim/simd_vectors.inc"

constexpr std::uint64_t kSourcesMax = 64;  // in vectors; longer lists are left to the definition

// store_rounded() needs the NaN of a bf16 sum in this form; for fp32 values any payload will do.
template <class Source, class Target>
HWY_INLINE void store_sum(FloatVector value, Target* target) {
  if constexpr (sizeof(Source) > sizeof(Target)) {
    const FloatVector quiet = hn::BitCast(kFloats, hn::Set(kBits, 0x7fc00000));
    value = hn::IfThenElse(hn::IsNaN(value), quiet, value);
  }
  store_rounded(value, target);
}

// Returns the number of elements summed, in whole vectors.
template <class Source, class Target>
std::uint64_t sum_vectors(const OrderedSum& sum) {
  constexpr std::size_t kLanes = hn::MaxLanes(kFloats);
  const std::size_t count = sum.sources.size();
  if (count > kSourcesMax) return 0;
  const Source* sources[kSourcesMax];
  for (std::size_t s = 0; s < count; ++s) sources[s] = static_cast<const Source*>(sum.sources[s]);
  auto* const target = static_cast<Target*>(sum.target);
  std::size_t i = 0;
  // Two independent chains of additions hide some of their latency.
  for (; i + 2 * kLanes <= sum.element_count; i += 2 * kLanes) {
    FloatVector low = load_as_float(kFloats, sources[0] + i);
    FloatVector high = load_as_float(kFloats, sources[0] + i + kLanes);
    for (std::size_t s = 1; s < count; ++s) {
      low = hn::Add(low, load_as_float(kFloats, sources[s] + i));
      high = hn::Add(high, load_as_float(kFloats, sources[s] + i + kLanes));
    }
    store_sum<Source>(low, target + i);
    store_sum<Source>(high, target + i + kLanes);
  }
  return i;
}

template <class Source>
std::uint64_t sum_into_any(const OrderedSum& sum) {
  switch (sum.target_type) {
    case DType::kFp32: break;
    case DType::kBf16: return sum_vectors<Source, Bf16>(sum);
    case DType::kFp16: return sum_vectors<Source, Fp16>(sum);
  }
  return sum_vectors<Source, float>(sum);
}

}  // namespace

std::uint64_t sum_in_order(const OrderedSum& sum) {
  switch (sum.source_type) {
    case DType::kFp32: break;
    case DType::kBf16: return sum_into_any<Bf16>(sum);
    case DType::kFp16: return sum_into_any<Fp16>(sum);
  }
  return sum_into_any<float>(sum);
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();
