// Every fp32 pattern as a split master, and every ratio that has an 8-bit code, through the vector
// kernels of every instruction set: minutes, so apart from update_simd_test.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu_optim/moment_codec.h"
#include "cpu_optim/simd_kernels.h"
#include "tests/cpu_optim/optimizer_data.h"

namespace sluice {
namespace {

// Runs of this length are all finite or all not: the limit lies between two of them.
constexpr std::uint32_t kRun = 0x8000;

// Masters that an update leaves as they are, from halves and back.
class RoundTrip {
 public:
  // How many of the patterns from `first` on come back wrongly, or are missed when not finite.
  std::uint64_t count_wrong(const SimdKernels& kernels, std::uint32_t first) {
    for (std::uint32_t i = 0; i < kRun; ++i) {
      const SplitMaster halves = split_master(float_from_bits(first + i));
      high_[i] = halves.high;
      low_[i] = halves.low;
    }
    const NewState state = kernels
                               .update(keep_, {.master_layout = MasterLayout::kSplitBf16,
                                               .parameter = high_.data(),
                                               .low = low_.data(),
                                               .exp_avg = exp_avg_.data(),
                                               .exp_avg_sq = exp_avg_sq_.data(),
                                               .gradient = gradient_.data(),
                                               .element_count = kRun})
                               .state;
    std::uint64_t wrong = 0;
    for (std::uint32_t i = 0; i < kRun; ++i) {
      const SplitMaster expected = split_master(float_from_bits(first + i));
      const bool is_nan = ((first + i) & 0x7fffffffu) > 0x7f800000u;
      const bool is_nan_again =
          (high_[i] & 0x7fffu) > 0x7f80u && std::isnan(join_master({high_[i], low_[i]}));
      wrong += is_nan ? !is_nan_again : high_[i] != expected.high || low_[i] != expected.low;
    }
    const bool is_finite = (first & 0x7fffffffu) < non_finite_magnitude(MasterLayout::kSplitBf16);
    return wrong + ((state == NewState::kFinite) == is_finite ? 0 : kRun);
  }

 private:
  static AdamCoefficients keep() {
    AdamCoefficients coefficients = test_coefficients();
    coefficients.decay_factor = 1.0f;
    coefficients.step_size = 0.0f;
    return coefficients;
  }

  const AdamCoefficients keep_ = keep();
  std::vector<std::uint16_t> high_ = std::vector<std::uint16_t>(kRun);
  std::vector<std::int16_t> low_ = std::vector<std::int16_t>(kRun);
  std::vector<float> exp_avg_ = std::vector<float>(kRun, 1.0f);
  std::vector<float> exp_avg_sq_ = std::vector<float>(kRun, 1.0f);
  const std::vector<float> gradient_ = std::vector<float>(kRun, 1.0f);
};

TEST(Exhaustive, EverySplitMasterComesBackFromEveryInstructionSet) {
  RoundTrip round_trip;
  for (const SimdKernels& kernels : available_simd_kernels()) {
    std::uint64_t wrong = 0;
    std::uint32_t first = 0;
    do {
      wrong += round_trip.count_wrong(kernels, first);
    } while ((first += kRun) != 0);
    EXPECT_EQ(wrong, 0u) << kernels.target_name;
  }
}

// Every ratio of a moment to its scale, with groups of scale 1.
TEST(Exhaustive, EveryRatioHasTheCodeOfTheDefinition) {
  constexpr std::size_t kBatch = 4096 * kMomentGroupElements;
  constexpr std::uint32_t kOne = 0x3f800000;
  std::vector<float> ratios(kBatch);
  std::vector<std::uint8_t> expected(kBatch), actual(kBatch);
  std::vector<float> scales(kBatch / kMomentGroupElements);
  for (const auto& [book, sign] : {std::pair{CodeBook::kUnsigned, 0u},
                                   {CodeBook::kSigned, 0u},
                                   {CodeBook::kSigned, 0x80000000u}}) {
    for (std::uint32_t bits = 0; bits <= kOne;) {
      for (std::size_t i = 0; i < kBatch; ++i) {
        const bool is_scale = i % kMomentGroupElements == 0;
        ratios[i] = float_from_bits(is_scale ? kOne : std::min(bits++, kOne) | sign);
      }
      encode_moments(book, ratios, {.codes = expected.data(), .scales = scales.data()});
      for (const SimdKernels& kernels : available_simd_kernels()) {
        if (kernels.encode_code_groups == nullptr) continue;
        kernels.encode_codes(book, ratios, {.codes = actual.data(), .scales = scales.data()});
        ASSERT_TRUE(actual == expected) << kernels.target_name << " up to " << bits;
      }
    }
  }
}

}  // namespace
}  // namespace sluice
