#include "tools/tune/tournament.h"

#include <gtest/gtest.h>

#include <sluice/error.h>

namespace sluice {
namespace {

std::vector<Contender> played(std::vector<std::vector<double>> times) {
  std::vector<Contender> contenders;
  for (std::vector<double>& rounds : times)
    contenders.push_back({.round_s = std::move(rounds), .failure = {}});
  return contenders;
}

TEST(Tournament, TheQuickestWins) {
  EXPECT_EQ(winner_of(played({{2, 2, 2}, {1.5, 1.5, 1.5}, {1.2, 1.3, 1.2}})), 2u);
}

TEST(Tournament, TheGivenConfigWinsTies) {
  EXPECT_EQ(winner_of(played({{2, 2, 2}, {1.99, 1.985, 1.99}})), 0u);  // half a percent
  EXPECT_EQ(winner_of(played({{2, 2, 2}, {1.5, 2.01, 1.5}})), 0u);     // slower in one round
  EXPECT_EQ(winner_of(played({{2}, {1.95}})), 0u);                     // one round proves less
  EXPECT_EQ(winner_of(played({{2}, {1.9}})), 1u);
}

TEST(Tournament, TheMedianOfTwoRoundsIsBetweenThem) {
  const std::vector<Contender> contenders = played({{2, 4}, {1, 3}});
  EXPECT_EQ(contenders[0].median_s(), 3);
  EXPECT_EQ(contenders[1].median_s(), 2);
  EXPECT_EQ(gain_of(contenders, 1), (2 + 4.0 / 3) / 2);
  EXPECT_EQ(played({{5, 1, 2}})[0].median_s(), 2);
}

TEST(Tournament, AFailureLosesAndTheRestGoesOn) {
  unsigned runs = 0;
  const std::vector<Contender> contenders =
      run_tournament(3, 2, /*given_must_run=*/true, [&](std::size_t index, unsigned) {
        ++runs;
        if (index == 2) throw Error(ErrorCode::kOutOfMemory, "no room");
        return index == 1 ? 1.0 : 2.0;
      });
  EXPECT_EQ(runs, 5u);  // the failed one ran once
  EXPECT_EQ(contenders[2].failure, "no room");
  EXPECT_EQ(winner_of(contenders), 1u);
}

TEST(Tournament, AFailureOfTheGivenConfigEndsIt) {
  const auto fail = [](std::size_t, unsigned) -> double {
    throw Error(ErrorCode::kIo, "the drive is gone");
  };
  EXPECT_THROW((void)run_tournament(1, 1, /*given_must_run=*/true, fail), Error);
}

TEST(Tournament, AGivenConfigThatDoesNotFitLosesToAnythingThatRuns) {
  const std::vector<Contender> contenders =
      run_tournament(2, 1, /*given_must_run=*/false, [](std::size_t index, unsigned) {
        if (index == 0) throw Error(ErrorCode::kOutOfMemory, "no room");
        return 9.0;
      });
  EXPECT_EQ(winner_of(contenders), 1u);
}

TEST(Tournament, EveryRoundBeginsWithAnother) {
  std::vector<std::size_t> order;
  (void)run_tournament(3, 3, true, [&](std::size_t index, unsigned) {
    order.push_back(index);
    return 1.0;
  });
  EXPECT_EQ(order, (std::vector<std::size_t>{0, 1, 2, 1, 2, 0, 2, 0, 1}));
}

TEST(Tournament, PlansWhatTheTimeAllows) {
  const TournamentPlan quick = plan_tournament(120, 0.1, 0.5, 0, 3);
  EXPECT_EQ(quick.rounds, 5u);
  EXPECT_EQ(quick.candidates, 3u);
  EXPECT_EQ(quick.steps, 20u);
  const TournamentPlan slow = plan_tournament(120, 12, 3, 0, 3);  // 27 s a run
  EXPECT_EQ(slow.rounds, 1u);
  EXPECT_EQ(slow.steps, 1u);
  EXPECT_EQ(slow.candidates, 3u);
  EXPECT_EQ(plan_tournament(60, 12, 3, 0, 3).candidates, 1u);
  EXPECT_EQ(plan_tournament(1, 12, 3, 0, 3).candidates, 1u);  // never none
  EXPECT_EQ(plan_tournament(120, 0.1, 0.5, 7, 3).steps, 7u);
}

}  // namespace
}  // namespace sluice
