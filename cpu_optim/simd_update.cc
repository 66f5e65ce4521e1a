// The fused updates of every optimizer, master layout and gradient type, and the byte mover that
// they are compared with. Compiled once per instruction set, as simd_kernels.cc explains.
#include "cpu_optim/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_optim/simd_update.cc"  // NOLINT: Highway asks for a macro
#include <hwy/foreach_target.h>                        // must come before highway.h
#include <hwy/highway.h>

#include <cstdint>

#include "cpu_optim/simd_kernels.h"

// No function of another header may be defined or instantiated between these two macros, because
// the linker could keep its AVX-512 copy for all callers.
HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

#include "cpu_optim/simd_vectors.inc"
// after the file that these use
#include "cpu_optim/simd_masters.inc"
#include "cpu_optim/simd_rules.inc"
// after the masters
#include "cpu_optim/simd_moment_arrays.inc"

// The bits of the moments that masters hide, joined by "or". An exponent of all ones in the result
// may come from several finite moments. It cannot be missing where one moment is not finite. This
// filter takes one instruction per pair of groups; the maximum of the moments takes two, which
// costs 4 % of the split update (docs/results/adam.md).
template <class Rule>
HWY_INLINE SignedBitsVector joined_hidden(SignedBitsVector joined, const Group& first,
                                          const Group& second) {
  if constexpr (Rule::kHidden == HiddenMoment::kSquares)
    return hn::Or3(joined, hn::BitCast(kSignedBits, first.exp_avg_sq),
                   hn::BitCast(kSignedBits, second.exp_avg_sq));
  if constexpr (Rule::kHidden == HiddenMoment::kAverage)
    return hn::Or3(joined, hn::BitCast(kSignedBits, first.exp_avg),
                   hn::BitCast(kSignedBits, second.exp_avg));
  return joined;
}

HWY_INLINE bool may_hide_non_finite(SignedBitsVector joined) {
  const auto exponent = hn::Set(kSignedBits, 0x7f800000);
  return !hn::AllFalse(kSignedBits, hn::Eq(hn::And(joined, exponent), exponent));
}

// The larger of `largest` and a strip of `count` moments.
HWY_INLINE SignedBitsVector larger_of(SignedBitsVector largest, const float* moments,
                                      std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; i += 2 * kLanes)
    largest = larger(largest, load_pair(moments + i));
  return largest;
}

// Handles whole pairs of groups; the rest is the caller's. Plain stores in place beat streaming
// stores, because the lines have just been read.
template <class Rule, class Master, class Gradient, class Moments, class Coefficients>
VectorResult update(const Coefficients& coefficients, const UpdateArrays& arrays) {
  constexpr bool kAvg = Rule::kKeepsExpAvg, kSq = Rule::kKeepsExpAvgSq;
  const Rule rule(coefficients);
  Master master(arrays);
  Moments moments(arrays);
  const auto* HWY_RESTRICT gradient = static_cast<const Gradient*>(arrays.gradient);
  SignedBitsVector hidden = hn::Zero(kSignedBits);
  alignas(64) float strip[kStripElements];
  const std::uint64_t count = arrays.element_count - arrays.element_count % (2 * kLanes);
  for (std::uint64_t begin = 0, end = 0; begin < count; begin = end) {
    end = count - begin < kStripElements ? count : begin + kStripElements;
    float* const HWY_RESTRICT fresh = master.fresh_masters(begin, strip);
    float* const HWY_RESTRICT fresh_avg = moments.exp_avg.fresh(begin);
    float* const HWY_RESTRICT fresh_sq = moments.exp_avg_sq.fresh(begin);
    SignedBitsVector joined = hn::Zero(kSignedBits);
    for (std::uint64_t i = begin; i < end; i += 2 * kLanes) {
      const std::uint64_t at = i - begin;
      const Pair masters = master.load(i);
      const Pair gradients = load_pair(gradient + i);
      const Pair avg = moments.exp_avg.load(i);
      const Pair sq = moments.exp_avg_sq.load(i);
      const Group first = rule({masters.first, avg.first, sq.first}, gradients.first);
      const Group second = rule({masters.second, avg.second, sq.second}, gradients.second);
      store_fresh<kAvg>(first.exp_avg, second.exp_avg, fresh_avg + at);
      store_fresh<kSq>(first.exp_avg_sq, second.exp_avg_sq, fresh_sq + at);
      joined = joined_hidden<Rule>(joined, first, second);
      hn::StoreU(first.master, kFloats, fresh + at);
      hn::StoreU(second.master, kFloats, fresh + at + kLanes);
      if constexpr (!Master::kHasHalves) master.note({first.master, second.master});
    }
    if (may_hide_non_finite(joined))  // rare
      hidden = larger_of(hidden, Rule::kHidden == HiddenMoment::kSquares ? fresh_sq : fresh_avg,
                         end - begin);
    if constexpr (Master::kHasHalves) {
      for (std::uint64_t i = begin; i < end; i += 2 * kLanes)
        master.finish(load_pair(fresh + (i - begin)), i);
    }
    moments.finish(begin, end);
  }
  const bool is_finite = master.is_finite() && all_finite<MasterLayout::kFp32>(hidden);
  return {kTargetName, count, is_finite ? NewState::kFinite : NewState::kNonFinite};
}

template <class Rule, class Master, class Coefficients>
VectorResult update_gradient(const Coefficients& coefficients, const UpdateArrays& arrays) {
  using Moments = MomentsInPlace<Rule>;
  switch (arrays.gradient_dtype) {
    case DType::kFp32: return update<Rule, Master, float, Moments>(coefficients, arrays);
    case DType::kBf16: return update<Rule, Master, Bf16, Moments>(coefficients, arrays);
    case DType::kFp16: break;
  }
  return update<Rule, Master, Fp16, Moments>(coefficients, arrays);
}

template <class Rule, class Coefficients>
VectorResult update_layout(const Coefficients& coefficients, const UpdateArrays& arrays) {
  switch (arrays.master_layout) {
    case MasterLayout::kFp32: return update_gradient<Rule, Fp32Master>(coefficients, arrays);
    case MasterLayout::kSplitBf16:
      return update_gradient<Rule, SplitMasterHalves>(coefficients, arrays);
    case MasterLayout::kFp16: break;
  }
  return update_gradient<Rule, Fp16Master>(coefficients, arrays);
}

// Streams of words, of halves and of bytes, which an update reads and writes in place.
struct Streams {
  std::uint32_t* wide[3] = {};
  std::uint32_t* narrow[4] = {};
  std::uint32_t* bytes[2] = {};
};

// Moves the streams of an update as 32-bit words, in whole vectors even where the elements are
// halves or bytes, so that only the memory can slow it down.
template <int kWide, int kNarrow, int kBytes, bool kHasWideGradient, bool kWritesParameter>
void move_streams(const Streams& streams, const UpdateArrays& arrays, std::uint32_t seed) {
  const auto* HWY_RESTRICT gradient = static_cast<const std::uint32_t*>(arrays.gradient);
  auto* HWY_RESTRICT parameter = static_cast<std::uint32_t*>(arrays.parameter);
  const BitsVector mask = hn::Set(kBits, seed);
  const std::uint64_t element_count = arrays.element_count;
  for (std::uint64_t i = 0; i + 2 * kLanes <= element_count; i += 2 * kLanes) {
    const std::uint64_t half = i / 2;
    BitsVector change = hn::And(mask, hn::LoadU(kBits, gradient + (kHasWideGradient ? i : half)));
    if constexpr (kHasWideGradient)
      change = hn::Xor(change, hn::And(mask, hn::LoadU(kBits, gradient + i + kLanes)));
    for (int stream = 0; stream < kWide; ++stream) {
      std::uint32_t* const at = streams.wide[stream] + i;
      hn::StoreU(hn::Xor(change, hn::LoadU(kBits, at)), kBits, at);
      hn::StoreU(hn::Xor(change, hn::LoadU(kBits, at + kLanes)), kBits, at + kLanes);
    }
    for (int stream = 0; stream < kNarrow; ++stream) {
      std::uint32_t* const at = streams.narrow[stream] + half;
      hn::StoreU(hn::Xor(change, hn::LoadU(kBits, at)), kBits, at);
    }
    // A vector of bytes belongs to two passes of this loop.
    if (kBytes != 0 && i % (4 * kLanes) == 0 && i + 4 * kLanes <= element_count) {
      for (int stream = 0; stream < kBytes; ++stream) {
        std::uint32_t* const at = streams.bytes[stream] + i / 4;
        hn::StoreU(hn::Xor(change, hn::LoadU(kBits, at)), kBits, at);
      }
    }
    if constexpr (kWritesParameter) hn::StoreU(change, kBits, parameter + half);
  }
}

// The moments are `kWide` arrays of words, `kNarrow` of halves and `kBytes` of codes.
template <int kWide, int kNarrow, int kBytes, bool kHasWideGradient>
void move_layout(Streams streams, const UpdateArrays& arrays, std::uint32_t seed) {
  switch (arrays.master_layout) {
    case MasterLayout::kFp32:
      streams.wide[kWide] = static_cast<std::uint32_t*>(arrays.parameter);
      return move_streams<kWide + 1, kNarrow, kBytes, kHasWideGradient, false>(streams, arrays,
                                                                               seed);
    case MasterLayout::kSplitBf16:
      streams.narrow[kNarrow] = static_cast<std::uint32_t*>(arrays.parameter);
      streams.narrow[kNarrow + 1] = reinterpret_cast<std::uint32_t*>(arrays.low);
      return move_streams<kWide, kNarrow + 2, kBytes, kHasWideGradient, false>(streams, arrays,
                                                                               seed);
    case MasterLayout::kFp16:
      streams.wide[kWide] = reinterpret_cast<std::uint32_t*>(arrays.master);
      return move_streams<kWide + 1, kNarrow, kBytes, kHasWideGradient, true>(streams, arrays,
                                                                              seed);
  }
}

template <class Element>
int add_streams(std::uint32_t** streams, Element* first, Element* second) {
  int count = 0;
  for (Element* const moment : {first, second}) {
    if (moment != nullptr) streams[count++] = reinterpret_cast<std::uint32_t*>(moment);
  }
  return count;
}

template <bool kHasWideGradient>
void move_moments(const UpdateArrays& arrays, std::uint32_t seed) {
  Streams streams;
  const int wide = add_streams(streams.wide, arrays.exp_avg, arrays.exp_avg_sq);
  const int narrow = add_streams(streams.narrow, arrays.exp_avg_bf16, arrays.exp_avg_sq_bf16);
  const int bytes =
      add_streams(streams.bytes, arrays.exp_avg_codes.codes, arrays.exp_avg_sq_codes.codes);
  if (wide == 2) return move_layout<2, 0, 0, kHasWideGradient>(streams, arrays, seed);
  if (wide == 1) return move_layout<1, 0, 0, kHasWideGradient>(streams, arrays, seed);
  if (narrow == 2) return move_layout<0, 2, 0, kHasWideGradient>(streams, arrays, seed);
  if (narrow == 1) return move_layout<0, 1, 0, kHasWideGradient>(streams, arrays, seed);
  if (bytes == 2) return move_layout<0, 0, 2, kHasWideGradient>(streams, arrays, seed);
  move_layout<0, 0, 1, kHasWideGradient>(streams, arrays, seed);
}

}  // namespace

VectorResult update_adam(const AdamCoefficients& c, const UpdateArrays& arrays) {
  return update_layout<AdamRule>(c, arrays);
}
VectorResult update_adam_l2(const AdamL2Coefficients& c, const UpdateArrays& arrays) {
  return update_layout<AdamL2Rule>(c, arrays);
}
VectorResult update_lion(const LionCoefficients& c, const UpdateArrays& arrays) {
  return update_layout<LionRule>(c, arrays);
}
VectorResult update_adagrad(const AdagradCoefficients& c, const UpdateArrays& arrays) {
  return update_layout<AdagradRule>(c, arrays);
}
VectorResult update_sgd(const SgdCoefficients& c, const UpdateArrays& arrays) {
  return update_layout<SgdRule>(c, arrays);
}

VectorResult update_adam_bf16(const AdamCoefficients& c, const UpdateArrays& arrays) {
#if SLUICE_UPDATES_BF16
  using Moments = MomentsInHalves<AdamRule>;
  const bool has_wide_gradient = arrays.gradient_dtype == DType::kFp32;
  if (arrays.master_layout == MasterLayout::kFp32)
    return update<AdamRule, Fp32Master, float, Moments>(c, arrays);
  return has_wide_gradient ? update<AdamRule, SplitMasterHalves, float, Moments>(c, arrays)
                           : update<AdamRule, SplitMasterHalves, Bf16, Moments>(c, arrays);
#else
  (void)c;
  (void)arrays;
  return {kTargetName, 0, NewState::kFinite};
#endif
}

void move_bytes(const UpdateArrays& arrays, std::uint32_t seed) {
  arrays.gradient_dtype == DType::kFp32 ? move_moments<true>(arrays, seed)
                                        : move_moments<false>(arrays, seed);
}

std::uint64_t round_vectors(const FreshMoments& moments, const UpdateArrays& target,
                            RoundingWords words, std::uint32_t first_element) {
  const BitsVector first = hn::Set(kBits, words.first);
  const BitsVector second = hn::Set(kBits, words.second);
  const BitsVector low_half = hn::Set(kBits, 0xffff);
  const std::uint64_t count = target.element_count - target.element_count % kLanes;
  // Not in the loop: Iota() goes through memory, which costs more than the rest of it.
  BitsVector elements = hn::Iota(kBits, first_element);
  const BitsVector step = hn::Set(kBits, static_cast<std::uint32_t>(kLanes));
  for (std::uint64_t i = 0; i < count; i += kLanes) {
    const BitsVector random = random_bits_of(elements, first, second);
    elements = hn::Add(elements, step);
    if (moments.exp_avg != nullptr)
      store_stochastic(hn::LoadU(kFloats, moments.exp_avg + i), hn::And(random, low_half),
                       target.exp_avg_bf16 + i);
    if (moments.exp_avg_sq != nullptr)
      store_stochastic(hn::LoadU(kFloats, moments.exp_avg_sq + i), hn::ShiftRight<16>(random),
                       target.exp_avg_sq_bf16 + i);
  }
  return count;
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();
