// The update of a run whose moments are 8-bit codes, for any update of fp32 moments. Internal to
// cpu_optim. Pure, callable from any thread on disjoint memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "cpu_optim/update.h"

namespace sluice {

// Decoded moments of this many elements stay in the first cache, beside the code tables.
inline constexpr std::uint64_t kDecodedElements = 4 * kMomentGroupElements;

using EncodeMoments = void (*)(CodeBook book, std::span<const float> values,
                               const MomentCodes& moment);

// Calls `update` for parts of `arrays` with fp32 moments in place of codes. `update` returns a
// NewState.
template <class Update>
NewState update_codes(const UpdateArrays& arrays, EncodeMoments encode, const Update& update) {
  alignas(64) std::array<float, kDecodedElements> exp_avg;
  alignas(64) std::array<float, kDecodedElements> exp_avg_sq;
  NewState state = NewState::kFinite;
  for (std::uint64_t begin = 0; begin < arrays.element_count; begin += kDecodedElements) {
    const std::uint64_t count = std::min(kDecodedElements, arrays.element_count - begin);
    const UpdateArrays part = slice(arrays, begin, count);
    UpdateArrays decoded = part;
    decoded.exp_avg_codes = decoded.exp_avg_sq_codes = {};
    const auto decode = [&](CodeBook book, const MomentCodes& from, float* to) {
      if (!from.exist()) return static_cast<float*>(nullptr);
      decode_moments(book, from, 0, {to, count});
      return to;
    };
    decoded.exp_avg = decode(CodeBook::kSigned, part.exp_avg_codes, exp_avg.data());
    decoded.exp_avg_sq = decode(CodeBook::kUnsigned, part.exp_avg_sq_codes, exp_avg_sq.data());
    if (update(decoded) == NewState::kNonFinite) state = NewState::kNonFinite;
    if (part.exp_avg_codes.exist())
      encode(CodeBook::kSigned, {decoded.exp_avg, count}, part.exp_avg_codes);
    if (part.exp_avg_sq_codes.exist())
      encode(CodeBook::kUnsigned, {decoded.exp_avg_sq, count}, part.exp_avg_sq_codes);
  }
  return state;
}

}  // namespace sluice
