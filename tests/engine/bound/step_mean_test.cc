// The mean of simulated steps, and the queue of a resource.
#include "engine/bound/step_mean.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <queue>
#include <random>
#include <vector>

#include "engine/bound/ranked_queue.h"

namespace sluice {
namespace {

SimulatedState state_of(std::uint64_t value) {
  SimulatedState state;
  state.add(value);
  return state;
}

// Steps of the given seconds, each of which reads as many bytes; the mean, and the steps it took.
struct Found {
  StepCost mean;
  std::size_t steps = 0;
};
Found mean_of(const std::vector<double>& seconds, const std::vector<std::uint64_t>& states) {
  StepMean mean(3, 4);
  StepCost sum;
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    sum.step_s += seconds[i];
    sum.busy_s[2] += 2 * seconds[i];
    sum.traffic.nvme_read_bytes += static_cast<std::uint64_t>(seconds[i]);
    const auto state = states.empty() ? std::nullopt : std::optional(state_of(states[i]));
    if (const auto found = mean.note(sum, state)) return {.mean = *found, .steps = i + 1};
  }
  return {};
}

TEST(StepMean, IsThatOfTheCountedSteps) {
  const std::vector<double> seconds = {100, 50, 7, 1, 2, 3, 6};
  for (const auto& states :
       {std::vector<std::uint64_t>{}, std::vector<std::uint64_t>{1, 2, 3, 4, 5, 6, 7}}) {
    const Found found = mean_of(seconds, states);
    EXPECT_EQ(found.steps, 7u);
    EXPECT_EQ(found.mean.step_s, 3);
    EXPECT_EQ(found.mean.busy_s[2], 6);
    EXPECT_EQ(found.mean.traffic.nvme_read_bytes, 3u);
  }
}

TEST(StepMean, IsKnownWhenAStateReturns) {
  const Found next = mean_of({100, 5, 5, 5, 5, 5, 5}, {1, 1, 1, 1, 1, 1, 1});
  EXPECT_EQ(next.steps, 2u);
  EXPECT_EQ(next.mean.step_s, 5);
  EXPECT_EQ(next.mean.traffic.nvme_read_bytes, 5u);
  const Found every_other = mean_of({100, 50, 4, 8, 4, 8, 4}, {1, 2, 3, 2, 3, 2, 3});
  EXPECT_EQ(every_other.steps, 4u);
  EXPECT_EQ(every_other.mean.step_s, 6);
}

TEST(StepMean, IsThatOfTheCountedStepsWhereverAStateReturns) {
  const Found of_three = mean_of({1, 2, 3, 1, 2, 3, 1}, {1, 2, 3, 1, 2, 3, 1});
  EXPECT_EQ(of_three.steps, 4u);
  EXPECT_EQ(of_three.mean.step_s, 7.0 / 4);
  EXPECT_EQ(of_three.mean.traffic.nvme_read_bytes, 1u);  // 7 / 4, rounded down
  // Two of the counted steps come before the period.
  const Found late = mean_of({100, 5, 5, 9, 3, 5, 5}, {1, 2, 3, 4, 5, 5, 5});
  EXPECT_EQ(late.steps, 6u);
  EXPECT_EQ(late.mean.step_s, 22.0 / 4);
  EXPECT_EQ(late.mean.busy_s[2], 22.0 / 2);
}

TEST(SimulatedState, DependsOnEveryValueAndTheirOrder) {
  SimulatedState one, other;
  one.add(1);
  one.add(2);
  other.add(2);
  EXPECT_FALSE(one == other);
  other.add(1);
  EXPECT_FALSE(one == other);
}

struct Ranked {
  struct {
    std::uint64_t rank = 0;
  } job;
};

TEST(RankedQueue, TakesTheLowestRankFirst) {
  std::mt19937_64 random(7);
  RankedQueue<Ranked> queue;
  std::priority_queue<std::uint64_t, std::vector<std::uint64_t>, std::greater<>> oracle;
  std::uint64_t next = 0;
  for (int i = 0; i < 20'000; ++i) {
    if (random() % 2 == 0 || oracle.empty()) {
      // Mostly in order, and unique.
      const std::uint64_t place = random() % 4 == 0 ? next - random() % 50 : next;
      const std::uint64_t rank = random() % 4 << 56 | (1000 + place) << 20 | next++;
      queue.push({{rank}});
      oracle.push(rank);
      continue;
    }
    ASSERT_EQ(queue.pop().job.rank, oracle.top());
    oracle.pop();
    ASSERT_EQ(queue.empty(), oracle.empty());
  }
  std::size_t left = 0;
  queue.for_each([&](const Ranked&) { ++left; });
  EXPECT_EQ(left, oracle.size());
}

}  // namespace
}  // namespace sluice
