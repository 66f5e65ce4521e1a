// The kernel bodies (gpu/math/kernel_elements.h) that DeviceMath runs. Each index stands for eight
// elements. If all eight elements exist, each memory access has 16 bytes. The functions are pure.
#pragma once

#include <cstdint>

#include "base/moment_codes.h"
#include "base/moment_rounding.h"
#include "base/norm_accumulator.h"
#include "base/optimizer_math.h"
#include "gpu/math/device_math.h"
#include "gpu/math/kernel_elements.h"

namespace sluice {

inline constexpr std::uint32_t kInfinite = 0x7f800000u;
SLUICE_HOST_DEVICE inline bool is_finite_below(float value, std::uint32_t magnitude) {
  return (bits_from_float(value) & 0x7fffffffu) < magnitude;
}

// These functions load or store one pack of an array. The array has `count` elements, and the pack
// has the number `index`. For elements beyond the end of the array, a load gives zeros, and a store
// writes nothing. Every loop over a pack has eight rounds, so that the compiler unrolls the loop
// and keeps the pack in registers.
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

// Lane j adds the squares of the leaf's elements j, j + 8, j + 16, ... in this order.
template <class T>
struct NormLeavesBody {
  const T* gradient;
  std::uint64_t count;
  double* leaves;
  SLUICE_HOST_DEVICE double lane(std::uint64_t leaf, unsigned lane) const {
    const std::uint64_t begin = leaf * kNormLeafElements;
    const std::uint64_t end = begin + kNormLeafElements < count ? begin + kNormLeafElements : count;
    double sum = 0;
    for (std::uint64_t i = begin + lane; i < end; i += 8) {
      const double value = static_cast<double>(load(gradient[i]));
      sum += value * value;
    }
    return sum;
  }
  SLUICE_HOST_DEVICE void store(std::uint64_t leaf, double sum) const { leaves[leaf] = sum; }
};

// Lane j adds the numbers of the packs j, j + 8, j + 16, ... of 16 bytes. The number of a pack
// depends on its place, so that values that change places are noticed.
struct DigestBody {
  const unsigned char* values;
  std::uint64_t size_bytes;
  std::uint64_t* digests;
  SLUICE_HOST_DEVICE std::uint64_t lane(std::uint64_t piece, unsigned lane) const {
    struct alignas(16) Words {
      std::uint64_t first, second;
    };
    constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15u;
    const std::uint64_t begin = piece * kDigestBytes;
    const std::uint64_t end = begin + kDigestBytes < size_bytes ? begin + kDigestBytes : size_bytes;
    std::uint64_t sum = 0;
    for (std::uint64_t at = begin + lane * sizeof(Words); at < end; at += 8 * sizeof(Words)) {
      Words words{};
      if (at + sizeof(Words) <= end) {
        words = *reinterpret_cast<const Words*>(values + at);
      } else {
        for (std::uint64_t i = at; i < end; ++i)
          (i - at < 8 ? words.first : words.second) |= std::uint64_t{values[i]} << (i - at) % 8 * 8;
      }
      const std::uint64_t place = at / sizeof(Words) * 2 * kStep;
      sum += mix_bits(words.first + place + kStep) + mix_bits(words.second + place + 2 * kStep);
    }
    return sum;
  }
  SLUICE_HOST_DEVICE void store(std::uint64_t piece, std::uint64_t sum) const {
    digests[piece] = sum;
  }
};

// There is one struct for each format of masters. The functions of a struct load and store eight
// masters. A master of magnitude kNonFinite or more is not finite in the parameter's type.
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

// The array of a moment. If the array has fp32 values, `bf16` is null. If the array has bf16
// values, `values` is null.
struct DeviceMoment {
  float* values;
  std::uint16_t* bf16;

  SLUICE_HOST_DEVICE Pack<float> load(std::uint64_t index, std::uint64_t count) const {
    if (bf16 == nullptr) return load_pack(values, index, count);
    const Pack<std::uint16_t> halves = load_pack(bf16, index, count);
    Pack<float> pack;
    for (unsigned i = 0; i < kPackElements; ++i) pack.values[i] = float_from_bf16(halves.values[i]);
    return pack;
  }
  // Each moment uses one half of the random bits. `shift` selects this half.
  SLUICE_HOST_DEVICE void store(const Pack<float>& pack, const MomentRounding& rounding,
                                unsigned shift, std::uint64_t index, std::uint64_t count) const {
    if (bf16 == nullptr) return store_pack(pack, values, index, count);
    Pack<std::uint16_t> halves;
    for (unsigned i = 0; i < kPackElements; ++i) {
      const std::uint64_t element = rounding.first_element + index * kPackElements + i;
      const std::uint32_t random =
          random_bits(rounding_words(rounding.key, element), static_cast<std::uint32_t>(element));
      halves.values[i] = round_moment(pack.values[i], (random >> shift) & 0xffffu);
    }
    store_pack(halves, bf16, index, count);
  }
};

template <class Masters, class Gradient, class Coefficients>
struct UpdateBody {
  using R = Rule<Coefficients>;
  Masters masters;
  Coefficients coefficients;
  const Gradient* gradient;
  DeviceMoment exp_avg;
  DeviceMoment exp_avg_sq;
  MomentRounding rounding;
  std::uint64_t count;
  std::uint32_t* non_finite;

  SLUICE_HOST_DEVICE void operator()(std::uint64_t index) const {
    const Pack<Gradient> g = load_pack(gradient, index, count);
    Pack<float> p = masters.load(index, count);
    Pack<float> m{};
    Pack<float> v{};
    if constexpr (R::kExpAvg) m = exp_avg.load(index, count);
    if constexpr (R::kExpAvgSq) v = exp_avg_sq.load(index, count);
    bool is_finite = true;
    for (unsigned i = 0; i < kPackElements; ++i) {
      const AdamElement updated =
          R::apply(coefficients, {p.values[i], m.values[i], v.values[i]}, load(g.values[i]));
      p.values[i] = updated.master;
      m.values[i] = updated.exp_avg;
      v.values[i] = updated.exp_avg_sq;
      // The elements beyond the end of the array are zeros, and an update of zeros gives finite
      // values. The value of a moment is finite even if the optimizer does not keep the moment.
      is_finite = is_finite && is_finite_below(updated.master, Masters::kNonFinite) &&
                  is_finite_below(updated.exp_avg, kInfinite) &&
                  is_finite_below(updated.exp_avg_sq, kInfinite);
    }
    masters.store(p, index, count);
    if constexpr (R::kExpAvg) exp_avg.store(m, rounding, 0, index, count);
    if constexpr (R::kExpAvgSq) exp_avg_sq.store(v, rounding, 16, index, count);
    if (!is_finite) *non_finite = 1;
  }
};

// On a GPU, these functions are not inlined, because the search for a code and the tables of the
// search are long.
#ifdef __CUDACC__
#define SLUICE_ONCE __noinline__
#else
#define SLUICE_ONCE
#endif
SLUICE_HOST_DEVICE SLUICE_ONCE inline std::uint8_t device_code(CodeBook book, float value,
                                                               float scale) {
  return encode_moment(book, value, scale);
}
SLUICE_HOST_DEVICE SLUICE_ONCE inline float device_moment(CodeBook book, std::uint8_t code,
                                                          float scale) {
  return decode_moment(book, code, scale);
}
#undef SLUICE_ONCE

struct alignas(8) CodePack {
  std::uint8_t values[kPackElements];
};

// The codes of one moment. If the optimizer does not keep this moment, the pointers are null.
struct DeviceCodes {
  std::uint8_t* codes;
  float* scales;

  // Beyond the end of the run, load() returns the code of zero, and store() writes no code.
  SLUICE_HOST_DEVICE CodePack load(CodeBook book, std::uint64_t index, std::uint64_t count) const {
    const std::uint64_t begin = index * kPackElements;
    if (begin + kPackElements <= count) return *reinterpret_cast<const CodePack*>(codes + begin);
    CodePack pack;
    for (unsigned i = 0; i < kPackElements; ++i)
      pack.values[i] = begin + i < count ? codes[begin + i] : zero_code(book);
    return pack;
  }
  SLUICE_HOST_DEVICE void store(const CodePack& pack, std::uint64_t index,
                                std::uint64_t count) const {
    const std::uint64_t begin = index * kPackElements;
    if (begin + kPackElements <= count) {
      *reinterpret_cast<CodePack*>(codes + begin) = pack;
      return;
    }
    for (unsigned i = 0; i < kPackElements; ++i)
      if (begin + i < count) codes[begin + i] = pack.values[i];
  }
};

// The counterpart of UpdateBody for moments that are stored as 8-bit codes. A team updates one
// group. Every thread first computes the update of its packs, which gives the new scales of the
// group, and then encodes the moments with these scales. A lane of a warp has one pack.
template <class Masters, class Gradient, class Coefficients>
struct UpdateCodesBody {
  using R = Rule<Coefficients>;
  static constexpr std::uint64_t kGroupPacks = kMomentGroupElements / kPackElements;
  Masters masters;
  Coefficients coefficients;
  const Gradient* gradient;
  DeviceCodes exp_avg;
  DeviceCodes exp_avg_sq;
  std::uint64_t count;
  std::uint32_t* non_finite;

  struct Updated {
    Pack<float> p, m, v;
  };

  SLUICE_HOST_DEVICE Updated update(std::uint64_t pack, float m_scale, float v_scale) const {
    const Pack<Gradient> g = load_pack(gradient, pack, count);
    Updated state{masters.load(pack, count), {}, {}};
    CodePack m{}, v{};
    if constexpr (R::kExpAvg) m = exp_avg.load(CodeBook::kSigned, pack, count);
    if constexpr (R::kExpAvgSq) v = exp_avg_sq.load(CodeBook::kUnsigned, pack, count);
    for (unsigned i = 0; i < kPackElements; ++i) {
      float old_m = 0, old_v = 0;
      if constexpr (R::kExpAvg) old_m = device_moment(CodeBook::kSigned, m.values[i], m_scale);
      if constexpr (R::kExpAvgSq) old_v = device_moment(CodeBook::kUnsigned, v.values[i], v_scale);
      const AdamElement updated =
          R::apply(coefficients, {state.p.values[i], old_m, old_v}, load(g.values[i]));
      state.p.values[i] = updated.master;
      state.m.values[i] = updated.exp_avg;
      state.v.values[i] = updated.exp_avg_sq;
    }
    return state;
  }

  template <class Team>
  SLUICE_HOST_DEVICE void operator()(const Team& team, std::uint64_t group) const {
    constexpr unsigned kThreadPacks = kGroupPacks / Team::kSize;
    const std::uint64_t begin = group * kGroupPacks + team.rank();
    const std::uint64_t packs = (count + kPackElements - 1) / kPackElements;
    float old_m_scale = 0, old_v_scale = 0;
    if constexpr (R::kExpAvg) old_m_scale = exp_avg.scales[group];
    if constexpr (R::kExpAvgSq) old_v_scale = exp_avg_sq.scales[group];
    float m_scale = 0, v_scale = 0;
    Updated updated[kThreadPacks];
    for (unsigned n = 0; n < kThreadPacks; ++n) {
      const std::uint64_t pack = begin + n * Team::kSize;
      if (pack >= packs) break;
      updated[n] = update(pack, old_m_scale, old_v_scale);
      for (unsigned i = 0; i < kPackElements; ++i) {
        const float m = moment_magnitude(updated[n].m.values[i]);
        const float v = moment_magnitude(updated[n].v.values[i]);
        m_scale = m_scale < m ? m : m_scale;
        v_scale = v_scale < v ? v : v_scale;
      }
    }
    // After the barrier in team.max(), every thread has read the old scales.
    m_scale = team.max(m_scale);
    v_scale = team.max(v_scale);
    for (unsigned n = 0; n < kThreadPacks; ++n) {
      const std::uint64_t pack = begin + n * Team::kSize;
      if (pack < packs) store(pack, updated[n], m_scale, v_scale);
    }
    if (team.rank() != 0) return;
    if constexpr (R::kExpAvg) exp_avg.scales[group] = m_scale;
    if constexpr (R::kExpAvgSq) exp_avg_sq.scales[group] = v_scale;
  }

  SLUICE_HOST_DEVICE void store(std::uint64_t pack, const Updated& updated, float m_scale,
                                float v_scale) const {
    CodePack m{}, v{};
    bool is_finite = true;
    for (unsigned i = 0; i < kPackElements; ++i) {
      if constexpr (R::kExpAvg)
        m.values[i] = device_code(CodeBook::kSigned, updated.m.values[i], m_scale);
      if constexpr (R::kExpAvgSq)
        v.values[i] = device_code(CodeBook::kUnsigned, updated.v.values[i], v_scale);
      is_finite = is_finite && is_finite_below(updated.p.values[i], Masters::kNonFinite) &&
                  is_finite_moment(updated.m.values[i]) && is_finite_moment(updated.v.values[i]);
    }
    masters.store(updated.p, pack, count);
    if constexpr (R::kExpAvg) exp_avg.store(m, pack, count);
    if constexpr (R::kExpAvgSq) exp_avg_sq.store(v, pack, count);
    if (!is_finite) *non_finite = 1;
  }
};

}  // namespace sluice
