// Updates with 8-bit moments against those of bitsandbytes.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <vector>

#include "cpu_optim/update.h"
#include "tests/cpu_optim/moment_data.h"

namespace sluice {
namespace {

// Updates by bitsandbytes on the CPU (tests/golden/bitsandbytes_8bit.py says what is in the file).
// Its order of operations is another one, so a moment between two codes may get either. Its
// library for the CPU looks codes up in steps of 2^-15 of the scale, which are coarser than the
// codes below 1e-4. A group of zeros has arbitrary codes there.
class BitsAndBytes {
 public:
  BitsAndBytes() : file_(SLUICE_GOLDEN_DIR "/bitsandbytes_8bit.bin", std::ios::binary) {
    count = read<std::uint32_t>(1)[0];
    steps = read<std::uint32_t>(1)[0];
  }
  template <class T>
  std::vector<T> read(std::size_t values) {
    std::vector<T> all(values);
    file_.read(reinterpret_cast<char*>(all.data()),
               static_cast<std::streamsize>(values * sizeof(T)));
    EXPECT_TRUE(file_.good());
    return all;
  }
  Codes read_moment() {
    Codes codes(count);
    codes.codes = read<std::uint8_t>(count);
    codes.scales = read<float>(codes.scales.size());
    return codes;
  }

  std::uint32_t count = 0;
  std::uint32_t steps = 0;

 private:
  std::ifstream file_;
};

void expect_close(CodeBook book, Codes& actual, Codes& expected) {
  for (std::size_t i = 0; i < actual.codes.size(); ++i) {
    const float scale = expected.scales[i / 256];
    ASSERT_NEAR(actual.scales[i / 256], scale, 1e-6f * scale);
    if (scale == 0) {
      ASSERT_EQ(actual.codes[i], zero_code(book));
      expected.codes[i] = zero_code(book);
    }
    const float value = code_value(book, expected.codes[i]);
    const bool is_coarse = std::fabs(value) < 1e-4f &&
                           std::fabs(code_value(book, actual.codes[i]) - value) <= 0x1p-15f;
    if (!is_coarse) {
      ASSERT_NEAR(actual.codes[i], expected.codes[i], 1) << i;
    }
  }
}

TEST(UpdateCodes, BitsAndBytesGivesTheSameWithinOneCode) {
  BitsAndBytes golden;
  std::vector<float> parameter = golden.read<float>(golden.count);
  Codes m = encoded(CodeBook::kSigned, std::vector<float>(golden.count));
  Codes v = encoded(CodeBook::kUnsigned, std::vector<float>(golden.count));
  std::uint32_t other_codes = 0;
  for (std::uint32_t step = 1; step <= golden.steps; ++step) {
    const std::vector<float> gradient = golden.read<float>(golden.count);
    const std::vector<float> before = parameter;
    update_simd(adam_coefficients({.weight_decay = 0.1}, 1e-3, step, 1.0f),
                {.parameter = parameter.data(),
                 .exp_avg_codes = m.view(),
                 .exp_avg_sq_codes = v.view(),
                 .gradient = gradient.data(),
                 .element_count = golden.count});
    const std::vector<float> expected = golden.read<float>(golden.count);
    for (std::uint32_t i = 0; i < golden.count; ++i) {
      const float moved = std::fabs(expected[i] - before[i]);
      ASSERT_NEAR(parameter[i], expected[i], 2e-8f + 1e-5f * moved) << step << " " << i;
    }
    Codes expected_m = golden.read_moment();
    Codes expected_v = golden.read_moment();
    ASSERT_NO_FATAL_FAILURE(expect_close(CodeBook::kSigned, m, expected_m)) << step;
    ASSERT_NO_FATAL_FAILURE(expect_close(CodeBook::kUnsigned, v, expected_v)) << step;
    for (std::uint32_t i = 0; i < golden.count; ++i)
      other_codes += std::fabs(code_value(CodeBook::kSigned, expected_m.codes[i])) >= 1e-4f &&
                     m.codes[i] != expected_m.codes[i];
    parameter = expected;  // the next step starts from its state
    m = expected_m;
    v = expected_v;
  }
  EXPECT_LE(other_codes, golden.count * golden.steps / 100);
}

}  // namespace
}  // namespace sluice
