// The fused updates of every optimizer, master layout and gradient type, and the byte mover beside
// them. Compiled once per instruction set, as simd_kernels.cc explains.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_optim/simd_update.cc"  // NOLINT: Highway asks for a macro
#include <hwy/foreach_target.h>                        // must come before highway.h
#include <hwy/highway.h>

#include <cstdint>

#include "cpu_optim/simd_kernels.h"

// No function of another header may be defined or instantiated between these two macros: the linker
// could keep its AVX-512 copy for all.
HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

#include "cpu_optim/simd_vectors.inc"

using SignedBits = hn::RebindToSigned<Floats>;
using SignedHalves = hn::Rebind<std::int16_t, Floats>;
using SignedBitsVector = hn::Vec<SignedBits>;
constexpr SignedBits kSignedBits;
constexpr SignedHalves kSignedHalves;
constexpr std::size_t kLanes = hn::MaxLanes(kFloats);

struct Group {
  FloatVector master, exp_avg, exp_avg_sq;
};

// The optimizers: the element functions of base/optimizer_math.h on a group. Mul and Add stay
// apart: MulAdd would round once where the definition rounds twice.
struct AdamRule {
  static constexpr bool kKeepsExpAvg = true, kKeepsExpAvgSq = true;

  explicit AdamRule(const AdamCoefficients& c)
      : gradient_scale(hn::Set(kFloats, c.gradient_scale)),
        beta1(hn::Set(kFloats, c.beta1)),
        one_minus_beta1(hn::Set(kFloats, c.one_minus_beta1)),
        beta2(hn::Set(kFloats, c.beta2)),
        one_minus_beta2(hn::Set(kFloats, c.one_minus_beta2)),
        inverse_correction(hn::Set(kFloats, c.inverse_sqrt_correction2)),
        epsilon(hn::Set(kFloats, c.epsilon)),
        decay_factor(hn::Set(kFloats, c.decay_factor)),
        step_size(hn::Set(kFloats, c.step_size)) {}

  HWY_INLINE Group with_scaled_gradient(Group s, FloatVector g) const {
    const FloatVector m = hn::Add(hn::Mul(beta1, s.exp_avg), hn::Mul(one_minus_beta1, g));
    const FloatVector v =
        hn::Add(hn::Mul(beta2, s.exp_avg_sq), hn::Mul(hn::Mul(one_minus_beta2, g), g));
    const FloatVector denominator = hn::Add(hn::Mul(hn::Sqrt(v), inverse_correction), epsilon);
    const FloatVector p =
        hn::Sub(hn::Mul(s.master, decay_factor), hn::Mul(step_size, hn::Div(m, denominator)));
    return {p, m, v};
  }
  HWY_INLINE Group operator()(Group s, FloatVector gradient) const {
    return with_scaled_gradient(s, hn::Mul(gradient, gradient_scale));
  }

  FloatVector gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_correction,
      epsilon, decay_factor, step_size;
};

struct AdamL2Rule {
  static constexpr bool kKeepsExpAvg = true, kKeepsExpAvgSq = true;

  explicit AdamL2Rule(const AdamL2Coefficients& c) : adam(c.adam), l2(hn::Set(kFloats, c.l2)) {}
  HWY_INLINE Group operator()(Group s, FloatVector gradient) const {
    return adam.with_scaled_gradient(
        s, hn::Add(hn::Mul(gradient, adam.gradient_scale), hn::Mul(l2, s.master)));
  }

  AdamRule adam;
  FloatVector l2;
};

struct LionRule {
  static constexpr bool kKeepsExpAvg = true, kKeepsExpAvgSq = false;

  explicit LionRule(const LionCoefficients& c)
      : gradient_scale(hn::Set(kFloats, c.gradient_scale)),
        beta1(hn::Set(kFloats, c.beta1)),
        one_minus_beta1(hn::Set(kFloats, c.one_minus_beta1)),
        beta2(hn::Set(kFloats, c.beta2)),
        one_minus_beta2(hn::Set(kFloats, c.one_minus_beta2)),
        decay_factor(hn::Set(kFloats, c.decay_factor)),
        learning_rate(hn::Set(kFloats, c.learning_rate)) {}
  HWY_INLINE Group operator()(Group s, FloatVector gradient) const {
    const FloatVector g = hn::Mul(gradient, gradient_scale);
    const FloatVector direction = hn::Add(hn::Mul(beta1, s.exp_avg), hn::Mul(one_minus_beta1, g));
    const FloatVector m = hn::Add(hn::Mul(beta2, s.exp_avg), hn::Mul(one_minus_beta2, g));
    const FloatVector zero = hn::Zero(kFloats);
    const FloatVector down =
        hn::IfThenElse(hn::Lt(direction, zero), hn::Neg(learning_rate), direction);
    const FloatVector move = hn::IfThenElse(hn::Gt(direction, zero), learning_rate, down);
    return {hn::Sub(hn::Mul(s.master, decay_factor), move), m, s.exp_avg_sq};
  }

  FloatVector gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, decay_factor,
      learning_rate;
};

struct AdagradRule {
  static constexpr bool kKeepsExpAvg = false, kKeepsExpAvgSq = true;

  explicit AdagradRule(const AdagradCoefficients& c)
      : gradient_scale(hn::Set(kFloats, c.gradient_scale)),
        l2(hn::Set(kFloats, c.l2)),
        epsilon(hn::Set(kFloats, c.epsilon)),
        learning_rate(hn::Set(kFloats, c.learning_rate)) {}
  HWY_INLINE Group operator()(Group s, FloatVector gradient) const {
    const FloatVector g = hn::Add(hn::Mul(gradient, gradient_scale), hn::Mul(l2, s.master));
    const FloatVector sum = hn::Add(s.exp_avg_sq, hn::Mul(g, g));
    const FloatVector ratio = hn::Div(g, hn::Add(hn::Sqrt(sum), epsilon));
    return {hn::Sub(s.master, hn::Mul(learning_rate, ratio)), s.exp_avg, sum};
  }

  FloatVector gradient_scale, l2, epsilon, learning_rate;
};

struct SgdRule {
  static constexpr bool kKeepsExpAvg = true, kKeepsExpAvgSq = false;

  explicit SgdRule(const SgdCoefficients& c)
      : gradient_scale(hn::Set(kFloats, c.gradient_scale)),
        l2(hn::Set(kFloats, c.l2)),
        momentum(hn::Set(kFloats, c.momentum)),
        learning_rate(hn::Set(kFloats, c.learning_rate)) {}
  HWY_INLINE Group operator()(Group s, FloatVector gradient) const {
    const FloatVector g = hn::Add(hn::Mul(gradient, gradient_scale), hn::Mul(l2, s.master));
    const FloatVector m = hn::Add(hn::Mul(momentum, s.exp_avg), g);
    return {hn::Sub(s.master, hn::Mul(learning_rate, m)), m, s.exp_avg_sq};
  }

  FloatVector gradient_scale, l2, momentum, learning_rate;
};

// The master layouts: a group of masters from memory, and two groups back.
struct Fp32Master {
  static constexpr MasterLayout kLayout = MasterLayout::kFp32;

  explicit Fp32Master(const UpdateArrays& arrays) : master(static_cast<float*>(arrays.parameter)) {}
  HWY_INLINE FloatVector load(std::size_t i) const { return hn::LoadU(kFloats, master + i); }
  HWY_INLINE void store(FloatVector first, FloatVector second, std::size_t i) const {
    hn::StoreU(first, kFloats, master + i);
    hn::StoreU(second, kFloats, master + i + kLanes);
  }

  float* HWY_RESTRICT master;
};

struct Fp16Master {
  static constexpr MasterLayout kLayout = MasterLayout::kFp16;

  explicit Fp16Master(const UpdateArrays& arrays)
      : master(arrays.master), parameter(static_cast<Fp16*>(arrays.parameter)) {}
  HWY_INLINE FloatVector load(std::size_t i) const { return hn::LoadU(kFloats, master + i); }
  HWY_INLINE void store(FloatVector first, FloatVector second, std::size_t i) const {
    hn::StoreU(first, kFloats, master + i);
    hn::StoreU(second, kFloats, master + i + kLanes);
    store_rounded(first, parameter + i);
    store_rounded(second, parameter + i + kLanes);
  }

  float* HWY_RESTRICT master;
  Fp16* HWY_RESTRICT parameter;
};

struct SplitMasterHalves {
  static constexpr MasterLayout kLayout = MasterLayout::kSplitBf16;

  explicit SplitMasterHalves(const UpdateArrays& arrays)
      : high(static_cast<std::uint16_t*>(arrays.parameter)), low(arrays.low) {}

  // join_master(). A NaN needs no case of its own: its `high` is at least 0x7f81 in magnitude, and
  // 0x7f81'0000 - 0x8000 still lies above infinity. Only the payload differs.
  HWY_INLINE FloatVector load(std::size_t i) const {
    const BitsVector rounded =
        hn::BitCast(kBits, load_as_float(kFloats, reinterpret_cast<const Bf16*>(high) + i));
    const auto remainder = hn::PromoteTo(kSignedBits, hn::LoadU(kSignedHalves, low + i));
    return hn::BitCast(kFloats, hn::Add(rounded, hn::BitCast(kBits, remainder)));
  }

  // split_master(): half away from zero in magnitude, so adding 0x8000 carries into `high`. In a
  // NaN it could carry into the sign; here it is always a quiet one, being a result of arithmetic.
  static HWY_INLINE BitsVector rounded(FloatVector value) {
    const BitsVector bits = hn::BitCast(kBits, value);
    const auto is_nan = hn::RebindMask(kBits, hn::IsNaN(value));
    return hn::IfThenElse(is_nan, bits, hn::Add(bits, hn::Set(kBits, 0x8000)));
  }

  // Two groups at once fill a whole vector of halves: a vector's upper halves are its odd 16-bit
  // lanes, the lower ones its even lanes.
  HWY_INLINE void store(FloatVector first, FloatVector second, std::size_t i) const {
#if HWY_TARGET == HWY_SCALAR
    store_one(first, i);
    store_one(second, i + kLanes);
#else
    constexpr hn::Repartition<std::uint16_t, Floats> kWhole;
    const auto top = hn::ConcatOdd(kWhole, hn::BitCast(kWhole, rounded(second)),
                                   hn::BitCast(kWhole, rounded(first)));
    const auto rest =
        hn::ConcatEven(kWhole, hn::BitCast(kWhole, second), hn::BitCast(kWhole, first));
    hn::StoreU(top, kWhole, high + i);
    hn::StoreU(rest, kWhole, reinterpret_cast<std::uint16_t*>(low) + i);
#endif
  }

#if HWY_TARGET == HWY_SCALAR
  HWY_INLINE void store_one(FloatVector value, std::size_t i) const {
    const BitsVector bits = hn::BitCast(kBits, value);
    hn::StoreU(hn::TruncateTo(kHalves, hn::ShiftRight<16>(rounded(value))), kHalves, high + i);
    hn::StoreU(hn::BitCast(kSignedHalves, hn::TruncateTo(kHalves, bits)), kSignedHalves, low + i);
  }
#endif

  std::uint16_t* HWY_RESTRICT high;
  std::int16_t* HWY_RESTRICT low;
};

// A moment's array, or nothing where the optimizer keeps none.
template <bool kIsKept>
struct Moment {
  HWY_INLINE FloatVector load(std::size_t i) const {
    if constexpr (kIsKept) return hn::LoadU(kFloats, values + i);
    return hn::Zero(kFloats);
  }
  HWY_INLINE void store(FloatVector value, std::size_t i) const {
    if constexpr (kIsKept) hn::StoreU(value, kFloats, values + i);
  }

  float* HWY_RESTRICT values;
};

HWY_INLINE SignedBitsVector magnitude(FloatVector value) {
  return hn::BitCast(kSignedBits, hn::Abs(value));
}

// Whole pairs of groups; the rest is the caller's. Plain stores in place beat streaming ones,
// because the lines have just been read.
template <class Rule, class Master, class Gradient, class Coefficients>
VectorResult update(const Coefficients& coefficients, const UpdateArrays& arrays) {
  const Rule rule(coefficients);
  const Master master(arrays);
  const Moment<Rule::kKeepsExpAvg> exp_avg{arrays.exp_avg};
  const Moment<Rule::kKeepsExpAvgSq> exp_avg_sq{arrays.exp_avg_sq};
  const auto* HWY_RESTRICT gradient = static_cast<const Gradient*>(arrays.gradient);
  const std::uint64_t element_count = arrays.element_count;  // stores cannot change a local
  SignedBitsVector largest = hn::Zero(kSignedBits);
  std::uint64_t i = 0;
  for (; i + 2 * kLanes <= element_count; i += 2 * kLanes) {
    const std::uint64_t j = i + kLanes;
    const Group first = rule({master.load(i), exp_avg.load(i), exp_avg_sq.load(i)},
                             load_as_float(kFloats, gradient + i));
    const Group second = rule({master.load(j), exp_avg.load(j), exp_avg_sq.load(j)},
                              load_as_float(kFloats, gradient + j));
    exp_avg.store(first.exp_avg, i);
    exp_avg.store(second.exp_avg, j);
    exp_avg_sq.store(first.exp_avg_sq, i);
    exp_avg_sq.store(second.exp_avg_sq, j);
    master.store(first.master, second.master, i);
    largest = hn::Max(largest, hn::Max(magnitude(first.master), magnitude(second.master)));
  }
  const auto limit = static_cast<std::int32_t>(non_finite_magnitude(Master::kLayout)) - 1;
  const bool is_finite = hn::AllFalse(kSignedBits, hn::Gt(largest, hn::Set(kSignedBits, limit)));
  return {kTargetName, i, is_finite ? Masters::kFinite : Masters::kNonFinite};
}

template <class Rule, class Master, class Coefficients>
VectorResult update_gradient(const Coefficients& coefficients, const UpdateArrays& arrays) {
  switch (arrays.gradient_dtype) {
    case DType::kFp32: return update<Rule, Master, float>(coefficients, arrays);
    case DType::kBf16: return update<Rule, Master, Bf16>(coefficients, arrays);
    case DType::kFp16: break;
  }
  return update<Rule, Master, Fp16>(coefficients, arrays);
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

// The streams of an update as 32-bit words, whole vectors of them even where the elements are
// halves: nothing but the memory can slow it down.
template <int kWide, int kNarrow, bool kHasWideGradient, bool kWritesParameter>
void move_streams(std::uint32_t* const* wide, std::uint32_t* const* narrow,
                  const UpdateArrays& arrays, std::uint32_t seed) {
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
      std::uint32_t* const at = wide[stream] + i;
      hn::StoreU(hn::Xor(change, hn::LoadU(kBits, at)), kBits, at);
      hn::StoreU(hn::Xor(change, hn::LoadU(kBits, at + kLanes)), kBits, at + kLanes);
    }
    for (int stream = 0; stream < kNarrow; ++stream) {
      std::uint32_t* const at = narrow[stream] + half;
      hn::StoreU(hn::Xor(change, hn::LoadU(kBits, at)), kBits, at);
    }
    if constexpr (kWritesParameter) hn::StoreU(change, kBits, parameter + half);
  }
}

template <int kMoments, bool kHasWideGradient>
void move_layout(const UpdateArrays& arrays, std::uint32_t seed) {
  std::uint32_t* wide[3] = {};
  int count = 0;
  for (float* moment : {arrays.exp_avg, arrays.exp_avg_sq}) {
    if (moment != nullptr) wide[count++] = reinterpret_cast<std::uint32_t*>(moment);
  }
  std::uint32_t* const narrow[2] = {static_cast<std::uint32_t*>(arrays.parameter),
                                    reinterpret_cast<std::uint32_t*>(arrays.low)};
  switch (arrays.master_layout) {
    case MasterLayout::kFp32:
      wide[count] = static_cast<std::uint32_t*>(arrays.parameter);
      return move_streams<kMoments + 1, 0, kHasWideGradient, false>(wide, narrow, arrays, seed);
    case MasterLayout::kSplitBf16:
      return move_streams<kMoments, 2, kHasWideGradient, false>(wide, narrow, arrays, seed);
    case MasterLayout::kFp16:
      wide[count] = reinterpret_cast<std::uint32_t*>(arrays.master);
      return move_streams<kMoments + 1, 0, kHasWideGradient, true>(wide, narrow, arrays, seed);
  }
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

void move_bytes(const UpdateArrays& arrays, std::uint32_t seed) {
  const bool has_both = arrays.exp_avg != nullptr && arrays.exp_avg_sq != nullptr;
  const bool has_wide_gradient = arrays.gradient_dtype == DType::kFp32;
  if (has_both) {
    has_wide_gradient ? move_layout<2, true>(arrays, seed) : move_layout<2, false>(arrays, seed);
  } else {
    has_wide_gradient ? move_layout<1, true>(arrays, seed) : move_layout<1, false>(arrays, seed);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();
