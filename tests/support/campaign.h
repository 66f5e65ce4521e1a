// The number of cases and the first seed of a randomized test. These numbers come from the
// environment variables SLUICE_TEST_CASES and SLUICE_TEST_SEED. The options --cases and --seed of
// tools/test.sh set these variables. The option --slow sets SLUICE_TEST_CASES_SCALE, which
// multiplies the default number of cases. If the environment gives no first seed, one more case has
// a seed from the date. So runs on different days have different cases. The seed from the date is
// printed. The functions are pure, except for the environment, the date and standard output.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

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

// Returns the seeds of a campaign. If the environment gives no first seed, the last seed is the
// date, such as 20261122.
inline std::vector<std::uint64_t> seeds_of(const Campaign& campaign) {
  std::vector<std::uint64_t> seeds;
  for (std::uint64_t i = 0; i < campaign.cases; ++i) seeds.push_back(campaign.first_seed + i);
  if (std::getenv("SLUICE_TEST_SEED") != nullptr) return seeds;
  const std::chrono::year_month_day today(
      std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now()));
  seeds.push_back(static_cast<std::uint64_t>(static_cast<int>(today.year())) * 10000 +
                  static_cast<unsigned>(today.month()) * 100 + static_cast<unsigned>(today.day()));
  std::printf("the seed of the day is %llu\n", static_cast<unsigned long long>(seeds.back()));
  return seeds;
}

// Returns a stride that visits each of the numbers 0 .. count - 1 once. The stride is about `count`
// divided by the golden ratio. So the first few numbers lie far apart for every `count`. The
// function is meant for a `count` that depends on timing.
// A fixed stride may by chance be close to a multiple of `count`. The first few numbers would then
// all lie close together.
inline std::uint64_t even_stride(std::uint64_t count) {
  auto stride = static_cast<std::uint64_t>(static_cast<double>(count) * 0.6180339887);
  while (std::gcd(stride, count) != 1) ++stride;
  return stride;
}

}  // namespace sluice::test
