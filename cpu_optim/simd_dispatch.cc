#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include "cpu_optim/rank_sum.h"
#include "cpu_optim/simd_kernels.h"
#include "cpu_optim/update_encoded.h"

namespace sluice {
namespace {

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::tolower(static_cast<unsigned char>(a[i])) !=
        std::tolower(static_cast<unsigned char>(b[i])))
      return false;
  }
  return true;
}

VectorResult run(const SimdKernels& kernels, const AdamCoefficients& c,
                 const UpdateArrays& arrays) {
  return kernels.adam(c, arrays);
}
VectorResult run(const SimdKernels& kernels, const AdamL2Coefficients& c,
                 const UpdateArrays& arrays) {
  return kernels.adam_l2(c, arrays);
}
VectorResult run(const SimdKernels& kernels, const LionCoefficients& c,
                 const UpdateArrays& arrays) {
  return kernels.lion(c, arrays);
}
VectorResult run(const SimdKernels& kernels, const AdagradCoefficients& c,
                 const UpdateArrays& arrays) {
  return kernels.adagrad(c, arrays);
}
VectorResult run(const SimdKernels& kernels, const SgdCoefficients& c, const UpdateArrays& arrays) {
  return kernels.sgd(c, arrays);
}

// Whether all elements have the same words of rounding.
bool have_same_words(const UpdateArrays& arrays) {
  const std::uint64_t first = arrays.rounding.first_element;
  return first >> 32 == (first + arrays.element_count) >> 32;
}

// The coefficients, if the kernel adam_bf16 can make the update.
const AdamCoefficients* of_adam_bf16(const SimdKernels& kernels,
                                     const UpdateCoefficients& coefficients,
                                     const UpdateArrays& arrays) {
  const bool has_types =
      (arrays.master_layout == MasterLayout::kFp32 && arrays.gradient_dtype == DType::kFp32) ||
      (arrays.master_layout == MasterLayout::kSplitBf16 && arrays.gradient_dtype != DType::kFp16);
  const bool fits =
      kernels.adam_bf16 != nullptr && arrays.has_bf16() && has_types && have_same_words(arrays);
  return fits ? std::get_if<AdamCoefficients>(&coefficients) : nullptr;
}

}  // namespace

VectorResult SimdKernels::update(const UpdateCoefficients& coefficients,
                                 const UpdateArrays& arrays) const {
  const AdamCoefficients* const of_bf16 = of_adam_bf16(*this, coefficients, arrays);
  if (of_bf16 == nullptr && (arrays.has_codes() || arrays.has_bf16())) {
    const MomentConversions convert{
        .encode = [this](CodeBook book, std::span<const float> values,
                         const MomentCodes& moment) { encode_codes(book, values, moment); },
        .decode = [this](CodeBook book, const MomentCodes& moment,
                         std::span<float> values) { decode_codes(book, moment, values); },
        .bf16 = [this](const FreshMoments& moments,
                       const UpdateArrays& target) { round_moments(moments, target); }};
    const NewState state = update_encoded(arrays, convert, [&](const UpdateArrays& decoded) {
      return update(coefficients, decoded).state;
    });
    return {target_name, arrays.element_count, state};
  }
  VectorResult result =
      of_bf16 != nullptr
          ? adam_bf16(*of_bf16, arrays)
          : std::visit([&](const auto& c) { return run(*this, c, arrays); }, coefficients);
  const std::uint64_t done = result.element_count;
  if (done != arrays.element_count) {
    const NewState rest =
        update_reference(coefficients, slice(arrays, done, arrays.element_count - done));
    if (rest == NewState::kNonFinite) result.state = rest;
    result.element_count = arrays.element_count;
  }
  return result;
}

void SimdKernels::round_moments(const FreshMoments& moments, const UpdateArrays& target) const {
  const std::uint64_t count = target.element_count;
  const std::uint64_t first = target.rounding.first_element;
  // The words of an element and its position in their 2^32 elements.
  const RoundingWords words = rounding_words(target.rounding.key, first);
  std::uint64_t done = 0;
  if (have_same_words(target))
    done = round_vectors(moments, target, words, static_cast<std::uint32_t>(first));
  if (done != count) round_moments_reference(moments.from(done), slice(target, done, count - done));
}

void SimdKernels::encode_codes(CodeBook book, std::span<const float> values,
                               const MomentCodes& moment) const {
  if (encode_code_groups == nullptr) return encode_moments(book, values, moment);
  for (std::uint64_t done = 0; done < values.size();) {
    done += encode_code_groups(book, values.data() + done, values.size() - done, moment.from(done));
    if (done == values.size()) return;
    const std::uint64_t count = std::min(kMomentGroupElements, values.size() - done);
    encode_moments(book, values.subspan(done, count), moment.from(done));
    done += count;
  }
}

void SimdKernels::decode_codes(CodeBook book, const MomentCodes& moment,
                               std::span<float> values) const {
  const std::uint64_t done = decode_code_groups == nullptr
                                 ? 0
                                 : decode_code_groups(book, moment, values.size(), values.data());
  if (done != values.size()) decode_moments(book, moment.from(done), 0, values.subspan(done));
}

void SimdKernels::sum_in_order(const OrderedSum& sum) const {
  const std::uint64_t done = sum_vectors(sum);
  if (done == sum.element_count) return;
  std::vector<const void*> rest;
  for (const void* source : sum.sources)
    rest.push_back(static_cast<const std::byte*>(source) + done * size_of(sum.source_type));
  sum_in_order_reference(
      {.target = static_cast<std::byte*>(sum.target) + done * size_of(sum.target_type),
       .target_type = sum.target_type,
       .sources = rest,
       .source_type = sum.source_type,
       .element_count = sum.element_count - done});
}

const SimdKernels& select_simd_kernels(std::string_view name) {
  const std::span<const SimdKernels> available = available_simd_kernels();
  if (name.empty()) return available.front();
  std::string names;
  for (const SimdKernels& kernels : available) {
    if (equal_ignoring_case(kernels.target_name, name)) return kernels;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", kernels.target_name);
  }
  throw Error(ErrorCode::kConfig,
              fmt::format("SLUICE_SIMD is \"{}\", an instruction set that this build or this "
                          "processor lacks; unset it or set it to one of: {}",
                          name, names));
}

const SimdKernels& active_simd_kernels() {
  static const SimdKernels& kernels = [&]() -> const SimdKernels& {
    const char* forced = std::getenv("SLUICE_SIMD");
    return select_simd_kernels(forced == nullptr ? "" : forced);
  }();
  return kernels;
}

std::string_view simd_target_name() {
  return active_simd_kernels().target_name;
}

}  // namespace sluice
