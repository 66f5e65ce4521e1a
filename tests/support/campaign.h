// How many cases a randomized test runs and where it begins: SLUICE_TEST_CASES and SLUICE_TEST_SEED
// in the environment, set by tools/test.sh --cases and --seed; SLUICE_TEST_CASES_SCALE multiplies
// the default (--slow). Pure but for the environment.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace sluice::test {

struct Campaign {
  std::uint64_t first_seed = 1;
  std::uint64_t cases = 0;
};

inline Campaign campaign(std::uint64_t default_cases) {
  const auto number = [](const char* name, std::uint64_t fallback) {
    const char* text = std::getenv(name);
    return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
  };
  return {
      .first_seed = number("SLUICE_TEST_SEED", 1),
      .cases = number("SLUICE_TEST_CASES", default_cases * number("SLUICE_TEST_CASES_SCALE", 1))};
}

}  // namespace sluice::test
