// The global gradient norm, as a sum that does not depend on the order. Each leaf is the sum of the
// squares of 256 consecutive elements, added in fp64 in a fixed tree (cpu_optim/gradient_ops.h).
// NormAccumulator adds each leaf to a fixed-point integer that is wide enough for every possible
// leaf (Kulisch 1981). So leaves may come in any order from blocks, threads and ranks, and the
// total has the same bits. Accumulators can be added as integers, word by word, as an integer
// all-reduce does. An accumulator is not thread-safe. Use one accumulator per thread, and merge the
// accumulators at the end.
#pragma once

#include <array>
#include <cstdint>

namespace sluice {

class NormAccumulator {
  static constexpr int kLimbs = 22;

 public:
  // The limbs, and the number of accumulators that are not finite.
  using Words = std::array<std::uint64_t, kLimbs + 1>;

  // Adds one leaf, which is a sum of squares of fp32 values. So a finite leaf is zero or in
  // [2^-298, 2^330). If a leaf is infinite or NaN, finite() is false
  // from then on, and nothing else changes.
  // Requires: leaf is not negative.
  void add(double leaf);

  // Adds all leaves of `other`.
  void merge(const NormAccumulator& other);

  // The words() of at most 2^32 accumulators can be added. The sum equals the words() of the merged
  // accumulator.
  Words words() const;
  static NormAccumulator of_words(const Words& words);

  bool finite() const { return !non_finite_; }

  // The total, rounded once to double (nearest, ties to even). The total is NaN if a leaf was not
  // finite.
  double sum_of_squares() const;

 private:
  void carry();

  // Limb i holds 32 bits of weight 2^(32 i - 320), with 32 spare bits above for lazy carries.
  static constexpr int kLowestExponent = -320;
  std::array<std::uint64_t, kLimbs> limbs_{};
  std::uint32_t pending_ = 0;  // additions since the last carry; each adds less than 2^32 to a limb
  bool non_finite_ = false;
};

}  // namespace sluice
