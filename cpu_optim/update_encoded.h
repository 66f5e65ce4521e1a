// Applies an update function for fp32 moments to a run whose moments are bf16 or 8-bit codes. The
// header is internal to cpu_optim. The functions are pure, and any thread may call them on disjoint
// memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>

#include "cpu_optim/update.h"

namespace sluice {

// The number of decoded moments that fit into the first-level cache together with the code tables.
inline constexpr std::uint64_t kDecodedElements = 4 * kMomentGroupElements;

// The new moments in fp32. If the optimizer does not keep one of the moments, the pointer for this
// moment is null.
struct FreshMoments {
  const float* exp_avg = nullptr;
  const float* exp_avg_sq = nullptr;

  FreshMoments from(std::uint64_t begin) const {
    return {exp_avg == nullptr ? nullptr : exp_avg + begin,
            exp_avg_sq == nullptr ? nullptr : exp_avg_sq + begin};
  }
};

// The functions that convert moments. `bf16` converts new moments to bf16 and stores them in the
// arrays of `target`.
struct MomentConversions {
  std::function<void(CodeBook book, std::span<const float> values, const MomentCodes& moment)>
      encode;
  std::function<void(CodeBook book, const MomentCodes& moment, std::span<float> values)> decode;
  std::function<void(const FreshMoments& moments, const UpdateArrays& target)> bf16;
};

inline void round_moments_reference(const FreshMoments& moments, const UpdateArrays& target) {
  const MomentRounding rounding = target.rounding;
  for (std::uint64_t i = 0; i < target.element_count; ++i) {
    const std::uint64_t element = rounding.first_element + i;
    const std::uint32_t random =
        random_bits(rounding_words(rounding.key, element), static_cast<std::uint32_t>(element));
    if (moments.exp_avg != nullptr)
      target.exp_avg_bf16[i] = round_moment(moments.exp_avg[i], random & 0xffffu);
    if (moments.exp_avg_sq != nullptr)
      target.exp_avg_sq_bf16[i] = round_moment(moments.exp_avg_sq[i], random >> 16);
  }
}

// Converts `values` to fp32, stores the results in `target`, and returns `target`. `values` is null
// if the optimizer does not keep the moment. If `values` is null, the result is null, too.
inline float* decoded_bf16(const std::uint16_t* values, std::uint64_t count, float* target) {
  if (values == nullptr) return nullptr;
  for (std::uint64_t i = 0; i < count; ++i) target[i] = float_from_bf16(values[i]);
  return target;
}
// Divides `arrays` into parts, and calls `update` for one part after another. In each call, fp32
// moments replace the encoded moments. `update` returns a NewState.
template <class Update>
NewState update_encoded(const UpdateArrays& arrays, const MomentConversions& convert,
                        const Update& update) {
  alignas(64) std::array<float, kDecodedElements> exp_avg;
  alignas(64) std::array<float, kDecodedElements> exp_avg_sq;
  NewState state = NewState::kFinite;
  for (std::uint64_t begin = 0; begin < arrays.element_count; begin += kDecodedElements) {
    const std::uint64_t count = std::min(kDecodedElements, arrays.element_count - begin);
    const UpdateArrays part = slice(arrays, begin, count);
    UpdateArrays decoded = part;
    decoded.exp_avg_codes = decoded.exp_avg_sq_codes = {};
    decoded.exp_avg_bf16 = decoded.exp_avg_sq_bf16 = nullptr;
    if (part.has_bf16()) {
      decoded.exp_avg = decoded_bf16(part.exp_avg_bf16, count, exp_avg.data());
      decoded.exp_avg_sq = decoded_bf16(part.exp_avg_sq_bf16, count, exp_avg_sq.data());
    } else {
      const auto decode = [&](CodeBook book, const MomentCodes& codes, float* target) -> float* {
        if (!codes.exist()) return nullptr;
        convert.decode(book, codes, {target, count});
        return target;
      };
      decoded.exp_avg = decode(CodeBook::kSigned, part.exp_avg_codes, exp_avg.data());
      decoded.exp_avg_sq = decode(CodeBook::kUnsigned, part.exp_avg_sq_codes, exp_avg_sq.data());
    }
    if (update(decoded) == NewState::kNonFinite) state = NewState::kNonFinite;
    if (part.has_bf16()) {
      convert.bf16({decoded.exp_avg, decoded.exp_avg_sq}, part);
      continue;
    }
    if (part.exp_avg_codes.exist())
      convert.encode(CodeBook::kSigned, {decoded.exp_avg, count}, part.exp_avg_codes);
    if (part.exp_avg_sq_codes.exist())
      convert.encode(CodeBook::kUnsigned, {decoded.exp_avg_sq, count}, part.exp_avg_sq_codes);
  }
  return state;
}

}  // namespace sluice
