// The environment is set for a scope or for a thread, and the caller finds its own unchanged.
#include "base/float_environment.h"

#include <gtest/gtest.h>

#include <cfenv>
#include <cstdlib>

#include "base/named_thread.h"
#include "tests/support/hostile_environment.h"

namespace sluice::test {
namespace {

TEST(FloatEnvironment, SetsAndRestores) {
  if (!kKnowsEnvironment) GTEST_SKIP() << "the environment is set on x86-64 and aarch64 only";
  for (const unsigned hostile : kHostile) {
    unsigned inside = 0;
    const unsigned after = run_under(hostile, [&] {
      const FloatEnvironment environment;
      inside = control();
    });
    EXPECT_EQ(inside, kDefault);
    EXPECT_EQ(after, hostile);
  }
}

// libc asks for the mode in a place of its own.
TEST(FloatEnvironment, RoundsTextToTheNearestNumber) {
  if (!kKnowsEnvironment) GTEST_SKIP() << "the environment is set on x86-64 and aarch64 only";
  const char* volatile text = "1e23";  // between two numbers: up, down and nearest differ in pairs
  const double nearest = std::strtod(text, nullptr);
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    ASSERT_EQ(std::fesetround(mode), 0);
    double inside = 0;
    {
      const FloatEnvironment environment;
      inside = std::strtod(text, nullptr);
    }
    const int after = std::fegetround();
    (void)std::fesetround(FE_TONEAREST);
    EXPECT_EQ(inside, nearest);
    EXPECT_EQ(after, mode);
  }
}

// A function of the application inside of a call may change the environment for good.
TEST(FloatEnvironment, RestoresWhatAFunctionHasChanged) {
  if (!kKnowsEnvironment) GTEST_SKIP() << "the environment is set on x86-64 and aarch64 only";
  {
    const FloatEnvironment environment;
    (void)std::fesetround(FE_UPWARD);
    set_control(kHostile[0]);
  }
  EXPECT_EQ(control(), kDefault);
  EXPECT_EQ(std::fegetround(), FE_TONEAREST);
}

TEST(FloatEnvironment, IsThatOfEveryThreadThatIsStarted) {
  if (!kKnowsEnvironment) GTEST_SKIP() << "the environment is set on x86-64 and aarch64 only";
  for (const unsigned hostile : kHostile) {
    unsigned inside = 0;
    int rounding = -1;
    const unsigned after = run_under(hostile, [&] {
      start_thread("test", [&] {
        inside = control();
        rounding = std::fegetround();
      }).join();
    });
    EXPECT_EQ(inside, kDefault);
    EXPECT_EQ(rounding, FE_TONEAREST);
    EXPECT_EQ(after, hostile);
  }
}

}  // namespace
}  // namespace sluice::test
