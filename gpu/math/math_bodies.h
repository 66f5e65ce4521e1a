// The kernel bodies (gpu/math/kernel_elements.h) behind DeviceMath. Each index stands for eight
// elements. If all eight elements exist, memory accesses have 16 bytes. Pure.
#pragma once

#include <cstdint>

#include "base/optimizer_math.h"
#include "gpu/math/device_math.h"
#include "gpu/math/kernel_elements.h"

namespace sluice {

inline constexpr std::uint32_t kInfinite = 0x7f800000u;
SLUICE_HOST_DEVICE inline bool is_finite_below(float value, std::uint32_t magnitude) {
  return (bits_from_float(value) & 0x7fffffffu) < magnitude;
}

// Loads or stores pack `index` of an array of `count` elements. Elements beyond the end are zero,
// and are not written. Every loop over a pack has eight rounds, so that the compiler unrolls the
// loop and keeps the pack in registers.
template <class T>
SLUICE_HOST_DEVICE inline Pack<T> load_pack(const T* array, std::uint64_t index,
                                            std::uint64_t count) {
  const std::uint64_t begin = index * kPackElements;
  if (begin + kPackElements <= count) return *reinterpret_cast<const Pack<T>*>(array + begin);
  Pack<T> pack{};
  for (unsigned i = 0; i < kPackElements; ++i)
    if (begin + i < count) pack.values[i] = array[begin + i];
  return pack;
}
template <class T>
SLUICE_HOST_DEVICE inline void store_pack(const Pack<T>& pack, T* array, std::uint64_t index,
                                          std::uint64_t count) {
  const std::uint64_t begin = index * kPackElements;
  if (begin + kPackElements <= count) {
    *reinterpret_cast<Pack<T>*>(array + begin) = pack;
    return;
  }
  for (unsigned i = 0; i < kPackElements; ++i)
    if (begin + i < count) array[begin + i] = pack.values[i];
}

template <class To, class From>
struct ConvertBody {
  To* target;
  const From* source;
  std::uint64_t count;
  SLUICE_HOST_DEVICE void operator()(std::uint64_t index) const {
    const Pack<From> from = load_pack(source, index, count);
    Pack<To> to;
    for (unsigned i = 0; i < kPackElements; ++i) store(load(from.values[i]), to.values[i]);
    store_pack(to, target, index, count);
  }
};

template <class T>
struct AccumulateBody {
  T* target;
  const T* source;
  std::uint64_t count;
  SLUICE_HOST_DEVICE void operator()(std::uint64_t index) const {
    Pack<T> sum = load_pack(target, index, count);
    const Pack<T> other = load_pack(source, index, count);
    for (unsigned i = 0; i < kPackElements; ++i)
      store(load(sum.values[i]) + load(other.values[i]), sum.values[i]);
    store_pack(sum, target, index, count);
  }
};

template <class T>
struct UnscaleBody {
  T* values;
  float factor;
  std::uint64_t count;
  std::uint32_t* overflow;
  SLUICE_HOST_DEVICE void operator()(std::uint64_t index) const {
    Pack<T> pack = load_pack(values, index, count);
    bool is_finite = true;
    for (unsigned i = 0; i < kPackElements; ++i) {
      store(load(pack.values[i]) * factor, pack.values[i]);
      is_finite = is_finite && is_finite_below(load(pack.values[i]), kInfinite);
    }
    store_pack(pack, values, index, count);
    if (!is_finite) *overflow = 1;  // all threads write the same value
  }
};

// Lane j of a leaf sums the squares of its elements j, j + 8, j + 16, ... in order.
template <class T>
struct NormLeavesBody {
  const T* gradient;
  std::uint64_t count;
  double* leaves;
  SLUICE_HOST_DEVICE double lane(std::uint64_t leaf, unsigned lane) const {
    const std::uint64_t begin = leaf * kDeviceLeafElements;
    const std::uint64_t end =
        begin + kDeviceLeafElements < count ? begin + kDeviceLeafElements : count;
    double sum = 0;
    for (std::uint64_t i = begin + lane; i < end; i += 8) {
      const double value = static_cast<double>(load(gradient[i]));
      sum += value * value;
    }
    return sum;
  }
  SLUICE_HOST_DEVICE void store(std::uint64_t leaf, double sum) const { leaves[leaf] = sum; }
};

// One struct for each format of masters. Loads and stores eight masters. A master of magnitude
// kNonFinite or more is not finite in the parameter's type.
struct Fp32Masters {
  static constexpr std::uint32_t kNonFinite = kInfinite;
  float* parameter;

  SLUICE_HOST_DEVICE Pack<float> load(std::uint64_t index, std::uint64_t count) const {
    return load_pack(parameter, index, count);
  }
  SLUICE_HOST_DEVICE void store(const Pack<float>& masters, std::uint64_t index,
                                std::uint64_t count) const {
    store_pack(masters, parameter, index, count);
  }
};

struct SplitMasters {
  static constexpr std::uint32_t kNonFinite = 0x7f7f8000u;
  std::uint16_t* parameter;
  std::int16_t* low;

  SLUICE_HOST_DEVICE Pack<float> load(std::uint64_t index, std::uint64_t count) const {
    const Pack<std::uint16_t> highs = load_pack(parameter, index, count);
    const Pack<std::int16_t> lows = load_pack(low, index, count);
    Pack<float> masters;
    for (unsigned i = 0; i < kPackElements; ++i)
      masters.values[i] = join_master({highs.values[i], lows.values[i]});
    return masters;
  }
  SLUICE_HOST_DEVICE void store(const Pack<float>& masters, std::uint64_t index,
                                std::uint64_t count) const {
    Pack<std::uint16_t> highs;
    Pack<std::int16_t> lows;
    for (unsigned i = 0; i < kPackElements; ++i) {
      const SplitMaster split = split_master(masters.values[i]);
      highs.values[i] = split.high;
      lows.values[i] = split.low;
    }
    store_pack(highs, parameter, index, count);
    store_pack(lows, low, index, count);
  }
};

struct Fp16Masters {
  static constexpr std::uint32_t kNonFinite = 0x477ff000u;  // 65520
  Fp16* parameter;
  float* master;

  SLUICE_HOST_DEVICE Pack<float> load(std::uint64_t index, std::uint64_t count) const {
    return load_pack(master, index, count);
  }
  SLUICE_HOST_DEVICE void store(const Pack<float>& masters, std::uint64_t index,
                                std::uint64_t count) const {
    Pack<Fp16> rounded;
    for (unsigned i = 0; i < kPackElements; ++i)
      sluice::store(masters.values[i], rounded.values[i]);
    store_pack(masters, master, index, count);
    store_pack(rounded, parameter, index, count);
  }
};

// The element function of an optimizer, and the moments that the optimizer keeps.
template <class Coefficients>
struct Rule;
#define SLUICE_RULE(coefficients, element_function, has_exp_avg, has_exp_avg_sq)                 \
  template <>                                                                                    \
  struct Rule<coefficients> {                                                                    \
    static constexpr bool kExpAvg = has_exp_avg;                                                 \
    static constexpr bool kExpAvgSq = has_exp_avg_sq;                                            \
    SLUICE_HOST_DEVICE static AdamElement apply(const coefficients& c, const AdamElement& state, \
                                                float gradient) {                                \
      return element_function(c, state, gradient);                                               \
    }                                                                                            \
  }
SLUICE_RULE(AdamCoefficients, adam_element, true, true);
SLUICE_RULE(AdamL2Coefficients, adam_l2_element, true, true);
SLUICE_RULE(LionCoefficients, lion_element, true, false);
SLUICE_RULE(AdagradCoefficients, adagrad_element, false, true);
SLUICE_RULE(SgdCoefficients, sgd_element, true, false);
#undef SLUICE_RULE

template <class Masters, class Gradient, class Coefficients>
struct UpdateBody {
  using R = Rule<Coefficients>;
  Masters masters;
  Coefficients coefficients;
  const Gradient* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  std::uint64_t count;
  std::uint32_t* non_finite;

  SLUICE_HOST_DEVICE void operator()(std::uint64_t index) const {
    const Pack<Gradient> g = load_pack(gradient, index, count);
    Pack<float> p = masters.load(index, count);
    Pack<float> m{};
    Pack<float> v{};
    if constexpr (R::kExpAvg) m = load_pack(exp_avg, index, count);
    if constexpr (R::kExpAvgSq) v = load_pack(exp_avg_sq, index, count);
    bool is_finite = true;
    for (unsigned i = 0; i < kPackElements; ++i) {
      const AdamElement updated =
          R::apply(coefficients, {p.values[i], m.values[i], v.values[i]}, load(g.values[i]));
      p.values[i] = updated.master;
      m.values[i] = updated.exp_avg;
      v.values[i] = updated.exp_avg_sq;
      // The update of zeros beyond the end is finite. A moment that is not kept is finite, too.
      is_finite = is_finite && is_finite_below(updated.master, Masters::kNonFinite) &&
                  is_finite_below(updated.exp_avg, kInfinite) &&
                  is_finite_below(updated.exp_avg_sq, kInfinite);
    }
    masters.store(p, index, count);
    if constexpr (R::kExpAvg) store_pack(m, exp_avg, index, count);
    if constexpr (R::kExpAvgSq) store_pack(v, exp_avg_sq, index, count);
    if (!is_finite) *non_finite = 1;
  }
};

}  // namespace sluice
