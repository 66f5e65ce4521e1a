// Computes the global gradient norm as a sum whose bits do not depend on the order of addition.
// Each leaf is the sum of the squares of 256 consecutive elements. The squares are added in fp64 in
// a fixed tree (cpu_optim/gradient_ops.h). NormAccumulator adds each leaf to a fixed-point integer
// that is wide enough for every possible leaf (Kulisch 1981). So the total has the same bits for
// every order in which the leaves of blocks, threads and ranks arrive. Accumulators can also be
// added as integers, word by word, for example by an integer all-reduce. An accumulator is not
// thread-safe. Use one accumulator per thread, and merge the accumulators at the end.
#pragma once

#include <array>
#include <cstdint>

namespace sluice {

// The number of elements in each leaf of the norm, on the CPU and on the device alike. Leaves are
// counted from the start of the unit, so each leaf starts at a multiple of this number.
inline constexpr std::uint64_t kNormLeafElements = 256;

class NormAccumulator {
  static constexpr int kLimbs = 22;

 public:
  // The array has the limbs of the fixed-point integer. The last word counts the accumulators that
  // are not finite.
  using Words = std::array<std::uint64_t, kLimbs + 1>;

  // Adds one leaf, which is a sum of squares of fp32 values. So a finite leaf is zero or in
  // [2^-298, 2^330). An infinite or NaN leaf is not added, but from then on finite() returns false.
  // Requires: the leaf is not negative.
  void add(double leaf);

  // Adds all leaves of `other`.
  void merge(const NormAccumulator& other);

  // The words of up to 2^32 accumulators can be added, word by word. From the sums, of_words()
  // makes one accumulator that has the leaves of all added accumulators.
  Words words() const;
  static NormAccumulator of_words(const Words& words);

  bool finite() const { return !non_finite_; }

  // The sum of all leaves, rounded once to double (nearest, ties to even). The result is NaN if any
  // leaf was infinite or NaN.
  double sum_of_squares() const;

 private:
  void carry();

  // Limb i holds 32 bits of weight 2^(32 i - 320). The upper 32 bits of each limb collect the
  // carries until carry() runs.
  static constexpr int kLowestExponent = -320;
  std::array<std::uint64_t, kLimbs> limbs_{};
  std::uint32_t pending_ = 0;  // additions since the last carry; each adds less than 2^32 to a limb
  bool non_finite_ = false;
};

}  // namespace sluice
