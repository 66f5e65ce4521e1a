// These functions round moments to bf16 (stochastic rounding). A value between two neighboring bf16
// numbers is rounded to one of them at random. The value is rounded more often to the nearer of the
// two numbers. So rounding is correct on average. Small changes of a moment therefore add up over
// the steps. Rounding to the nearest number would lose every small change. The random bits are a
// hash of the seed, the step, the tensor, and the element's index in the whole tensor. So
// placement, block size, threads and ranks never change the random bits. These functions define the
// result, and faster versions must give the same bits. The functions are pure, and any thread may
// call them.
#pragma once

#include <cstdint>

#include <sluice/device_function.h>
#include <sluice/dtype.h>

namespace sluice {

// The source of random bits for consecutive elements of one tensor in one step.
struct MomentRounding {
  std::uint64_t key = 0;            // the tensor's key in this step
  std::uint64_t first_element = 0;  // the first element's index in the whole tensor

  SLUICE_HOST_DEVICE constexpr MomentRounding from(std::uint64_t begin) const {
    return {.key = key, .first_element = first_element + begin};
  }
};

// The final mixing function of SplitMix64 (Steele, Lea, Flood 2014).
SLUICE_HOST_DEVICE constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
// The functions return the key of a step, and the key of one tensor in that step. A tensor's key is
// computed from the tensor's position in the model.
constexpr std::uint64_t rounding_key_of_step(std::uint64_t seed, std::uint64_t step) {
  return mix_bits(mix_bits(seed + 0x9e3779b97f4a7c15u) + step);
}
constexpr std::uint64_t rounding_key_of_tensor(std::uint64_t key_of_step, std::uint64_t tensor) {
  return mix_bits(key_of_step + (tensor + 1) * 0x9e3779b97f4a7c15u);
}

// The random bits of an element are made from the two words in this struct. Two elements share both
// words if the elements' indices differ only in the low 32 bits.
struct RoundingWords {
  std::uint32_t first = 0;
  std::uint32_t second = 0;
};
SLUICE_HOST_DEVICE constexpr RoundingWords rounding_words(std::uint64_t key,
                                                          std::uint64_t element) {
  const std::uint64_t mixed = mix_bits(key + (element >> 32));
  return {static_cast<std::uint32_t>(mixed), static_cast<std::uint32_t>(mixed >> 32)};
}
// Returns 32 random bits for one element. The low half is for exp_avg, and the high half is for
// exp_avg_sq. The constants come from Wellons' hash prospector (two rounds, bias 0.11).
SLUICE_HOST_DEVICE constexpr std::uint32_t random_bits(RoundingWords words, std::uint32_t element) {
  std::uint32_t x = element + words.first;
  x = (x ^ (x >> 16)) * 0x21f0aaadu;
  x ^= words.second;
  x = (x ^ (x >> 15)) * 0xd35a2d97u;
  return x ^ (x >> 15);
}

inline constexpr std::uint32_t kLargestBf16 = 0x7f7f;

// `random` has 16 bits. The function adds `random` to the low 16 bits of `value`. A bf16 number
// cannot hold these bits. If the sum overflows 16 bits, `value` is rounded away from zero.
// Otherwise, `value` is rounded toward zero. A value that bf16 can represent does not change. A
// finite value stays finite. Infinity and NaN do not change.
SLUICE_HOST_DEVICE inline std::uint16_t round_moment(float value, std::uint32_t random) {
  const std::uint32_t bits = bits_from_float(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x7f800000u)
    return static_cast<std::uint16_t>(sign | (magnitude > 0x7f800000u ? 0x7fc0u : 0x7f80u));
  const std::uint32_t rounded = (magnitude + random) >> 16;
  return static_cast<std::uint16_t>(sign | (rounded < kLargestBf16 ? rounded : kLargestBf16));
}

// Rounding is to nearest, with ties to even. This function is for values that do not come from an
// update. For example, a value may come from a checkpoint.
SLUICE_HOST_DEVICE inline std::uint16_t nearest_moment(float value) {
  return round_moment(value, 0x7fffu + ((bits_from_float(value) >> 16) & 1u));
}

SLUICE_HOST_DEVICE inline bool is_finite_half(std::uint16_t moment) {
  return (moment & 0x7f80u) != 0x7f80u;
}

}  // namespace sluice
