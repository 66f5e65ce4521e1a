#include "base/norm_accumulator.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include <sluice/error.h>

namespace sluice {
namespace {

__extension__ typedef unsigned __int128 Uint128;  // a GNU type, which -Wpedantic wants marked

}  // namespace

void NormAccumulator::add(double leaf) {
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(leaf);
  const std::uint64_t exponent_field = (bits >> 52) & 0x7ff;
  if (exponent_field == 0x7ff) {
    non_finite_ = true;
    return;
  }
  if (leaf == 0.0) return;
  SLUICE_CHECK(leaf >= 0x1p-298 && leaf < 0x1p330, "a leaf is a sum of squares of fp32 values");
  // leaf = mantissa * 2^(field - 1075); the shift places it on the limb grid.
  const std::uint64_t mantissa = (bits & ((std::uint64_t{1} << 52) - 1)) | (std::uint64_t{1} << 52);
  int shift = static_cast<int>(exponent_field) - 1075 - kLowestExponent;
  std::uint64_t kept = mantissa;
  if (shift < 0) {
    // Only zeros are cut: no square of an fp32 value has bits below 2^-298.
    kept >>= -shift;
    shift = 0;
  }
  const auto limb = static_cast<std::size_t>(shift / 32);
  const int offset = shift % 32;
  const Uint128 placed = static_cast<Uint128>(kept) << offset;  // < 2^85: three limbs
  limbs_[limb] += static_cast<std::uint32_t>(placed);
  limbs_[limb + 1] += static_cast<std::uint32_t>(placed >> 32);
  limbs_[limb + 2] += static_cast<std::uint32_t>(placed >> 64);
  if (++pending_ == std::numeric_limits<std::uint32_t>::max() / 2) carry();
}

void NormAccumulator::carry() {
  for (std::size_t i = 0; i + 1 < limbs_.size(); ++i) {
    limbs_[i + 1] += limbs_[i] >> 32;
    limbs_[i] &= 0xffffffffu;
  }
  pending_ = 0;
}

void NormAccumulator::merge(const NormAccumulator& other) {
  NormAccumulator normalized = other;
  normalized.carry();
  carry();
  for (std::size_t i = 0; i < limbs_.size(); ++i) limbs_[i] += normalized.limbs_[i];
  pending_ = 1;
  non_finite_ = non_finite_ || other.non_finite_;
}

NormAccumulator::Words NormAccumulator::words() const {
  NormAccumulator normalized = *this;
  normalized.carry();
  Words words{};
  std::ranges::copy(normalized.limbs_, words.begin());
  words.back() = non_finite_ ? 1 : 0;
  return words;
}

NormAccumulator NormAccumulator::of_words(const Words& words) {
  NormAccumulator total;
  std::copy_n(words.begin(), kLimbs, total.limbs_.begin());
  total.carry();
  total.non_finite_ = words.back() != 0;
  return total;
}

double NormAccumulator::sum_of_squares() const {
  if (non_finite_) return std::numeric_limits<double>::quiet_NaN();
  NormAccumulator normalized = *this;
  normalized.carry();
  const auto& limbs = normalized.limbs_;
  int top = kLimbs - 1;
  while (top >= 0 && limbs[static_cast<std::size_t>(top)] == 0) --top;
  if (top < 0) return 0.0;
  // The 64 bits below the leading one, with a sticky bit for everything lower, round once to the
  // nearest double.
  Uint128 head = 0;
  for (int i = top; i > top - 4; --i)
    head = (head << 32) | (i >= 0 ? limbs[static_cast<std::size_t>(i)] : 0);
  bool sticky = false;
  for (int i = 0; i <= top - 4; ++i) sticky = sticky || limbs[static_cast<std::size_t>(i)] != 0;
  int exponent = 32 * (top - 3) + kLowestExponent;
  // 33..64, because the top limb is not 0.
  const int surplus = 64 - std::countl_zero(static_cast<std::uint64_t>(head >> 64));
  const Uint128 dropped = head & ((static_cast<Uint128>(1) << surplus) - 1);
  std::uint64_t leading = static_cast<std::uint64_t>(head >> surplus);
  if (dropped != 0 || sticky) leading |= 1;
  exponent += surplus;
  // Converting a 64-bit integer rounds to nearest even; the sticky bit lies below the 53 bits that
  // survive.
  return std::ldexp(static_cast<double>(leading), exponent);
}

}  // namespace sluice
