#include "cpu_optim/update.h"

#include <type_traits>

#include <sluice/error.h>
#include "base/float_environment.h"
#include "cpu_optim/simd_kernels.h"
#include "cpu_optim/update_encoded.h"

namespace sluice {
namespace {

AdamElement element(const AdamCoefficients& c, AdamElement state, float gradient) {
  return adam_element(c, state, gradient);
}
AdamElement element(const AdamL2Coefficients& c, AdamElement state, float gradient) {
  return adam_l2_element(c, state, gradient);
}
AdamElement element(const LionCoefficients& c, AdamElement state, float gradient) {
  return lion_element(c, state, gradient);
}
AdamElement element(const AdagradCoefficients& c, AdamElement state, float gradient) {
  return adagrad_element(c, state, gradient);
}
AdamElement element(const SgdCoefficients& c, AdamElement state, float gradient) {
  return sgd_element(c, state, gradient);
}

void check(const UpdateArrays& arrays) {
  if (arrays.element_count == 0) return;
  SLUICE_CHECK(arrays.parameter != nullptr && arrays.gradient != nullptr &&
                   (arrays.has_exp_avg() || arrays.has_exp_avg_sq()),
               "an update needs parameter, gradient and moments");
  SLUICE_CHECK((arrays.low != nullptr) == (arrays.master_layout == MasterLayout::kSplitBf16),
               "`low` belongs to the split master, and only to it");
  SLUICE_CHECK((arrays.master != nullptr) == (arrays.master_layout == MasterLayout::kFp16),
               "`master` belongs to fp16 parameters, and only to them");
}

void check(const UpdateCoefficients& coefficients, const UpdateArrays& arrays) {
  check(arrays);
  if (arrays.element_count == 0) return;
  SLUICE_CHECK(!keeps_exp_avg(coefficients) || arrays.has_exp_avg(),
               "this optimizer needs exp_avg");
  SLUICE_CHECK(!keeps_exp_avg_sq(coefficients) || arrays.has_exp_avg_sq(),
               "this optimizer needs exp_avg_sq");
}

float gradient_at(const UpdateArrays& arrays, std::uint64_t i) {
  if (arrays.gradient_dtype == DType::kFp32) return static_cast<const float*>(arrays.gradient)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(arrays.gradient)[i];
  return arrays.gradient_dtype == DType::kBf16 ? float_from_bf16(bits) : float_from_fp16(bits);
}

float master_at(const UpdateArrays& arrays, std::uint64_t i) {
  switch (arrays.master_layout) {
    case MasterLayout::kFp32: return static_cast<const float*>(arrays.parameter)[i];
    case MasterLayout::kSplitBf16:
      return join_master({static_cast<const std::uint16_t*>(arrays.parameter)[i], arrays.low[i]});
    case MasterLayout::kFp16: break;
  }
  return arrays.master[i];
}

void set_master(const UpdateArrays& arrays, std::uint64_t i, float master) {
  if (arrays.master_layout == MasterLayout::kFp32) {
    static_cast<float*>(arrays.parameter)[i] = master;
  } else if (arrays.master_layout == MasterLayout::kFp16) {
    arrays.master[i] = master;
    static_cast<std::uint16_t*>(arrays.parameter)[i] = fp16_from_float(master);
  } else {
    const SplitMaster halves = split_master(master);
    static_cast<std::uint16_t*>(arrays.parameter)[i] = halves.high;
    arrays.low[i] = halves.low;
  }
}

// Returns the first part of an element's state that is not finite; empty if there is none.
std::string_view non_finite_part(MasterLayout layout, const AdamElement& state) {
  if (!is_finite_master(layout, state.master)) return "weight";
  if (!is_finite_master(MasterLayout::kFp32, state.exp_avg)) return "exp_avg";
  if (!is_finite_master(MasterLayout::kFp32, state.exp_avg_sq)) return "exp_avg_sq";
  return {};
}

AdamElement state_at(const UpdateArrays& arrays, std::uint64_t i) {
  return {.master = master_at(arrays, i),
          .exp_avg = arrays.exp_avg == nullptr ? 0.0f : arrays.exp_avg[i],
          .exp_avg_sq = arrays.exp_avg_sq == nullptr ? 0.0f : arrays.exp_avg_sq[i]};
}

bool is_lost(const MomentCodes& moment, std::uint64_t i) {
  return moment.exist() && is_lost_moment(moment.codes[i], moment.scales[i / kMomentGroupElements]);
}

bool is_lost(const std::uint16_t* moment, std::uint64_t i) {
  return moment != nullptr && !is_finite_half(moment[i]);
}

// Plain SGD keeps exp_avg as it is, and does not judge it either.
template <class Coefficients>
AdamElement judged_part(const Coefficients& c, AdamElement updated) {
  if constexpr (std::is_same_v<Coefficients, SgdCoefficients>)
    if (c.momentum == 0.0f) updated.exp_avg = 0.0f;
  return updated;
}

template <class Coefficients>
NewState update(const Coefficients& c, const UpdateArrays& arrays) {
  NewState state = NewState::kFinite;
  for (std::uint64_t i = 0; i < arrays.element_count; ++i) {
    const AdamElement updated = element(c, state_at(arrays, i), gradient_at(arrays, i));
    if (arrays.exp_avg != nullptr) arrays.exp_avg[i] = updated.exp_avg;
    if (arrays.exp_avg_sq != nullptr) arrays.exp_avg_sq[i] = updated.exp_avg_sq;
    set_master(arrays, i, updated.master);
    if (!non_finite_part(arrays.master_layout, judged_part(c, updated)).empty())
      state = NewState::kNonFinite;
  }
  return state;
}

}  // namespace

bool keeps_exp_avg(const UpdateCoefficients& coefficients) {
  return !std::holds_alternative<AdagradCoefficients>(coefficients);
}

bool keeps_exp_avg_sq(const UpdateCoefficients& coefficients) {
  return !std::holds_alternative<LionCoefficients>(coefficients) &&
         !std::holds_alternative<SgdCoefficients>(coefficients);
}

UpdateArrays slice(const UpdateArrays& arrays, std::uint64_t begin, std::uint64_t count) {
  SLUICE_CHECK(begin <= arrays.element_count && count <= arrays.element_count - begin,
               "a slice lies inside its arrays");
  const auto advance = [begin](auto* array) { return array == nullptr ? array : array + begin; };
  const std::uint64_t parameter_bytes = arrays.master_layout == MasterLayout::kFp32 ? 4 : 2;
  UpdateArrays part = arrays;
  part.parameter = static_cast<std::byte*>(arrays.parameter) + begin * parameter_bytes;
  part.low = advance(arrays.low);
  part.master = advance(arrays.master);
  part.exp_avg = advance(arrays.exp_avg);
  part.exp_avg_sq = advance(arrays.exp_avg_sq);
  part.exp_avg_codes = arrays.exp_avg_codes.from(begin);
  part.exp_avg_sq_codes = arrays.exp_avg_sq_codes.from(begin);
  part.exp_avg_bf16 = advance(arrays.exp_avg_bf16);
  part.exp_avg_sq_bf16 = advance(arrays.exp_avg_sq_bf16);
  part.rounding = arrays.rounding.from(begin);
  part.gradient =
      static_cast<const std::byte*>(arrays.gradient) + begin * size_of(arrays.gradient_dtype);
  part.element_count = count;
  return part;
}

UpdateBytes bytes_per_element(const UpdateArrays& arrays) {
  std::uint64_t in_place = 4;  // the master, in one piece or two
  const std::uint64_t moment = arrays.has_codes() ? 1 : arrays.has_bf16() ? 2 : 4;
  if (arrays.has_exp_avg()) in_place += moment;
  if (arrays.has_exp_avg_sq()) in_place += moment;
  return {.read = in_place + size_of(arrays.gradient_dtype),
          .write = in_place + (arrays.master_layout == MasterLayout::kFp16 ? 2 : 0)};
}

NewState update_reference(const UpdateCoefficients& coefficients, const UpdateArrays& arrays) {
  check(coefficients, arrays);
  const FloatEnvironment environment;
  if (arrays.has_codes() || arrays.has_bf16())
    return update_encoded(
        arrays,
        {.encode = encode_moments_reference,
         .decode = [](CodeBook book, const MomentCodes& moment,
                      std::span<float> values) { decode_moments(book, moment, 0, values); },
         .bf16 = round_moments_reference},
        [&](const UpdateArrays& decoded) { return update_reference(coefficients, decoded); });
  return std::visit([&](const auto& c) { return update(c, arrays); }, coefficients);
}

NewState update_simd(const UpdateCoefficients& coefficients, const UpdateArrays& arrays) {
  check(coefficients, arrays);
  const FloatEnvironment environment;
  return active_simd_kernels().update(coefficients, arrays).state;
}

NonFiniteState find_non_finite_state(const UpdateArrays& arrays) {
  for (std::uint64_t i = 0; i < arrays.element_count; ++i) {
    const std::string_view part = non_finite_part(arrays.master_layout, state_at(arrays, i));
    if (!part.empty()) return {i, part};
    if (is_lost(arrays.exp_avg_codes, i) || is_lost(arrays.exp_avg_bf16, i)) return {i, "exp_avg"};
    if (is_lost(arrays.exp_avg_sq_codes, i) || is_lost(arrays.exp_avg_sq_bf16, i))
      return {i, "exp_avg_sq"};
  }
  return {arrays.element_count, {}};
}

void move_like_update(const UpdateArrays& arrays, std::uint32_t seed) {
  check(arrays);
  active_simd_kernels().move(arrays, seed);
}

}  // namespace sluice
