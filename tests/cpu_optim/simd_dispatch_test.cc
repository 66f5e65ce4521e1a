// SLUICE_SIMD forces an instruction set. It is read once per process, so each case runs in a child.
#include <cstdlib>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <sluice/error.h>
#include "cpu_optim/simd_kernels.h"
#include "cpu_optim/simd_support.h"
#include "tests/cpu_optim/optimizer_data.h"

namespace sluice {
namespace {

std::string lower(std::string_view name) {
  std::string text(name);
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// In a child: exits with 0 when `expected` is what the kernels themselves say they are.
[[noreturn]] void run_forced(const std::string& name, std::string_view expected) {
  setenv("SLUICE_SIMD", name.c_str(), 1);
  OptimizerData data({.element_count = 100});
  const std::string_view ran =
      active_simd_kernels().update(test_coefficients(), data.arrays()).target_name;
  std::exit(ran == expected && simd_target_name() == expected ? 0 : 1);
}

[[noreturn]] void run_unknown() {
  setenv("SLUICE_SIMD", "AVX9000", 1);
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      simd_target_name();
      std::exit(1);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kConfig) std::exit(2);
      const std::string_view message = error.what();
      if (message.find("AVX9000") == message.npos) std::exit(3);
      for (const SimdKernels& kernels : available_simd_kernels()) {
        if (message.find(kernels.target_name) == message.npos) std::exit(4);
      }
    }
  }
  std::exit(0);
}

class SimdDispatchDeathTest : public ::testing::Test {
 protected:
  SimdDispatchDeathTest() { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(SimdDispatchDeathTest, ForcedTargetIsTheOneThatRuns) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    const std::string_view name = kernels.target_name;
    EXPECT_EXIT(run_forced(std::string(name), name), ::testing::ExitedWithCode(0), "") << name;
    EXPECT_EXIT(run_forced(lower(name), name), ::testing::ExitedWithCode(0), "") << name;
  }
}

TEST_F(SimdDispatchDeathTest, BestTargetRunsWhenNoneIsForced) {
  EXPECT_EXIT(run_forced("", available_simd_kernels().front().target_name),
              ::testing::ExitedWithCode(0), "");
}

TEST_F(SimdDispatchDeathTest, UnknownNameFailsAndListsTheKnown) {
  EXPECT_EXIT(run_unknown(), ::testing::ExitedWithCode(0), "");
}

// Highway's library is the oracle. Nothing but this test links it.
TEST(SimdDispatch, SetsAreThoseThatHighwayFinds) {
#if HWY_ARCH_X86
  const std::int64_t sets = HWY_SSE4 | HWY_AVX2 | HWY_AVX3;
  EXPECT_EQ(supported_instruction_sets(), hwy::SupportedTargets() & sets);
#else
  EXPECT_EQ(supported_instruction_sets(), 0);
#endif
}

TEST(SimdDispatch, TargetsAreDistinctAndSelectable) {
  const auto available = available_simd_kernels();
  ASSERT_FALSE(available.empty());
  for (std::size_t i = 0; i < available.size(); ++i) {
    EXPECT_EQ(&select_simd_kernels(available[i].target_name), &available[i]);
    for (std::size_t j = 0; j < i; ++j) {
      EXPECT_NE(available[i].target_name, available[j].target_name);
      EXPECT_NE(available[i].adam, available[j].adam);
    }
  }
#if defined(__x86_64__)
  EXPECT_GE(available.size(), 2u) << "one source for several instruction sets, but only "
                                  << available.front().target_name << " is here";
#endif
}

TEST(SimdDispatch, UnknownNameFailsWithConfig) {
  try {
    select_simd_kernels("neon9");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kConfig);
  }
}

}  // namespace
}  // namespace sluice
