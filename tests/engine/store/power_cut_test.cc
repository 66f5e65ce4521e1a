// The store's own code of commits and opening, cut short anywhere: it always opens, at a step that
// counted or a later one, with every bit. And wrong versions of it, each found.
#include <string>

#include <gtest/gtest.h>

#include "tests/engine/store/power_cut_cases.h"
#include "tests/support/campaign.h"

namespace sluice::test {
namespace {

TEST(PowerCut, NothingIsLost) {
  const Campaign cases = campaign(60);
  SimulationResult sum;
  for (const std::uint64_t seed : seeds_of(cases)) {
    const SimulationResult result = simulate_store(cut_case(seed, 4));
    ASSERT_EQ(result.failure, "") << "SLUICE_TEST_SEED=" << seed;
    sum.cuts += result.cuts;
    sum.cuts_in_recovery += result.cuts_in_recovery;
    sum.went_back += result.went_back;
    sum.steps += result.steps;
  }
  RecordProperty("cuts", static_cast<int>(sum.cuts));
  RecordProperty("cuts_in_recovery", static_cast<int>(sum.cuts_in_recovery));
  if (cases.cases < 60) return;
  EXPECT_GE(sum.cuts, 480u);
  EXPECT_GT(sum.cuts_in_recovery, 40u);  // all of it has been seen
  EXPECT_GT(sum.went_back, 20u);
  EXPECT_GT(sum.steps, 1000u);
}

// A simulation that finds nothing proves nothing.
class WrongProtocol : public ::testing::TestWithParam<Mutation> {};

TEST_P(WrongProtocol, IsFound) {
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    SimulationOptions options = cut_case(seed, 3);
    options.mutation = GetParam();
    if (!simulate_store(options).failure.empty()) return;
  }
  FAIL() << "400 trainings, and nothing was lost";
}

INSTANTIATE_TEST_SUITE_P(Mutations, WrongProtocol,
                         ::testing::Values(Mutation::kDataNotFlushed, Mutation::kRecordBeforeData,
                                           Mutation::kTwinsAtOnce, Mutation::kTwinsNotFlushed,
                                           Mutation::kFreedTooEarly, Mutation::kOwnCommitSuffices,
                                           Mutation::kStoreInPlace, Mutation::kCommitTooEarly,
                                           Mutation::kNewestOverwritten, Mutation::kGenerationStays,
                                           Mutation::kVoidLeftOut, Mutation::kMendLeftOut));

}  // namespace
}  // namespace sluice::test
