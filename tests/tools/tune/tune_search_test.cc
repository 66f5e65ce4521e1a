// The search, by made models of a step whose best settings are known.
#include "tools/tune/tune_search.h"

#include <cmath>

#include <gtest/gtest.h>

namespace sluice {
namespace {

TuneAxis axis(const char* key, std::initializer_list<const char*> values, bool is_fine = false) {
  TuneAxis axis{.name = key, .choices = {{}}, .is_fine = is_fine};
  for (const char* value : values) axis.choices.push_back({{key, value}});
  return axis;
}

int value_of(const TuneSettings& settings, const char* key, int given) {
  const auto found = settings.find(key);
  return found == settings.end() ? given : std::stoi(found->second);
}

TunePrediction step_of(double seconds) {
  return {.step_s = seconds, .rank_s = seconds};
}

TEST(TuneSearch, FindsTheBestOfIndependentAxes) {
  const std::vector<TuneAxis> axes = {axis("a", {"1", "2", "3"}), axis("b", {"1", "2", "3"})};
  const TuneResult result = tune_search(
      axes,
      [](const TuneSettings& settings) {
        const int a = value_of(settings, "a", 0), b = value_of(settings, "b", 0);
        return step_of(10 + std::abs(a - 2) + 2 * std::abs(b - 3));
      },
      3);
  ASSERT_FALSE(result.best.empty());
  EXPECT_EQ(result.best.front().settings, (TuneSettings{{"a", "2"}, {"b", "3"}}));
  EXPECT_EQ(result.best.front().prediction.step_s, 10);
  EXPECT_EQ(result.given.prediction.step_s, 18);
}

// Room alone and a home alone gain nothing; together they do. This is the config that keeps all on
// storage beside free memory.
TEST(TuneSearch, FindsAxesThatOnlyHelpTogether) {
  const std::vector<TuneAxis> axes = {axis("home", {"1", "2"}), axis("room", {"1", "2"})};
  const TuneResult result = tune_search(
      axes,
      [](const TuneSettings& settings) {
        const bool both = value_of(settings, "home", 0) == 2 && value_of(settings, "room", 0) == 1;
        return step_of(both ? 1 : 5);
      },
      3);
  ASSERT_EQ(result.best.size(), 1u);
  EXPECT_EQ(result.best.front().settings, (TuneSettings{{"home", "2"}, {"room", "1"}}));
}

TEST(TuneSearch, GivesBackSettingsThatGainNothing) {
  const std::vector<TuneAxis> axes = {axis("a", {"1", "2"}), axis("idle", {"1", "2"})};
  const TuneResult result = tune_search(
      axes,
      [](const TuneSettings& settings) {
        const double idle = value_of(settings, "idle", 0) == 1 ? 0.001 : 0;
        return step_of((value_of(settings, "a", 0) == 2 ? 1 : 2) - idle);
      },
      3);
  ASSERT_FALSE(result.best.empty());
  EXPECT_EQ(result.best.front().settings, (TuneSettings{{"a", "2"}}));
}

TEST(TuneSearch, NoneIsBetterThanAGivenConfigThatIsBest) {
  const std::vector<TuneAxis> axes = {axis("a", {"1", "2"})};
  const TuneResult result = tune_search(
      axes, [](const TuneSettings& settings) { return step_of(settings.empty() ? 1 : 0.9985); }, 3);
  EXPECT_TRUE(result.best.empty());
  EXPECT_TRUE(result.given.is_given());
}

TEST(TuneSearch, TakesWhatFitsWhereTheGivenConfigDoesNot) {
  const std::vector<TuneAxis> axes = {axis("a", {"1", "2", "3"}), axis("b", {"1", "2"})};
  const TuneResult result = tune_search(
      axes,
      [](const TuneSettings& settings) -> TunePrediction {
        if (value_of(settings, "a", 0) != 3) return {.obstacle = "too large"};
        return step_of(value_of(settings, "b", 0) == 2 ? 1 : 2);
      },
      3);
  EXPECT_EQ(result.given.prediction.obstacle, "too large");
  ASSERT_FALSE(result.best.empty());
  EXPECT_EQ(result.best.front().settings, (TuneSettings{{"a", "3"}, {"b", "2"}}));
}

TEST(TuneSearch, FinalistsDifferInMoreThanFineAxes) {
  const std::vector<TuneAxis> axes = {axis("a", {"1", "2"}),
                                      axis("fine", {"1", "2", "3"}, /*is_fine=*/true)};
  const TuneResult result = tune_search(
      axes,
      [](const TuneSettings& settings) {
        return step_of(10 - value_of(settings, "a", 0) - 0.2 * value_of(settings, "fine", 0));
      },
      3);
  ASSERT_EQ(result.best.size(), 3u);
  std::vector<int> homes;
  for (const TuneCandidate& candidate : result.best)
    homes.push_back(value_of(candidate.settings, "a", 0));
  EXPECT_EQ(homes, (std::vector<int>{2, 1, 0}));
}

// The model finds the given block the best, and the given config has run slower than that: other
// blocks are tried, too.
TEST(TuneSearch, AChoiceThatCostsTimeStaysACandidate) {
  const std::vector<TuneAxis> axes = {axis("block", {"1", "2"}),
                                      axis("lanes", {"1", "2"}, /*is_fine=*/true)};
  const TuneResult result = tune_search(
      axes,
      [](const TuneSettings& settings) -> TunePrediction {
        const double seconds = 1 + 0.1 * value_of(settings, "block", 0) +
                               (value_of(settings, "lanes", 0) == 2 ? 0 : 1);
        return {.step_s = seconds, .rank_s = settings.empty() ? 1.5 : seconds};
      },
      3);
  ASSERT_EQ(result.best.size(), 3u);
  std::vector<int> blocks;
  for (const TuneCandidate& candidate : result.best)
    blocks.push_back(value_of(candidate.settings, "block", 0));
  EXPECT_EQ(blocks, (std::vector<int>{0, 1, 2}));
}

TEST(TuneSearch, TheSecondFinalistDiffersWhereTheModelIsUnsure) {
  std::vector<TuneAxis> axes = {axis("order", {"1", "2", "3"}), axis("block", {"1", "2"})};
  const auto seconds_of = [](const TuneSettings& settings) {
    return step_of(3 - 0.1 * value_of(settings, "order", 0) + value_of(settings, "block", 0));
  };
  const auto with_given = [&](const TuneSettings& settings) {
    return settings.empty() ? step_of(9) : seconds_of(settings);
  };
  const auto blocks_of = [&] {
    std::vector<int> blocks;
    for (const TuneCandidate& candidate : tune_search(axes, with_given, 3).best)
      blocks.push_back(value_of(candidate.settings, "block", 0));
    return blocks;
  };
  EXPECT_EQ(blocks_of(), (std::vector<int>{0, 0, 0}));
  axes[1].is_unsure = true;
  EXPECT_EQ(blocks_of(), (std::vector<int>{0, 0, 1}));
}

TEST(TuneSearch, RanksEqualStepsByTheirWork) {
  const std::vector<TuneAxis> axes = {axis("a", {"1", "2"})};
  const TuneResult result = tune_search(
      axes,
      [](const TuneSettings& settings) -> TunePrediction {
        return {.step_s = 1, .rank_s = 1.5 - 0.2 * value_of(settings, "a", 0)};
      },
      1);
  ASSERT_EQ(result.best.size(), 1u);
  EXPECT_EQ(result.best.front().settings, (TuneSettings{{"a", "2"}}));
}

}  // namespace
}  // namespace sluice
