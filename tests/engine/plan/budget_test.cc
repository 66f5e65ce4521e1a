// The sizes that a refusal names work, a page less does not, and every larger one does: of models,
// ranks, homes and steps of all kinds.
#include <gtest/gtest.h>

#include <algorithm>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/sharding.h"
#include "engine/plan/step_plans.h"
#include "engine/planner/run_plan.h"
#include "tests/support/campaign.h"
#include "tests/support/random_run.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kLarge = std::uint64_t{1} << 40;

// Why the budgets do not work, nothing when they do: places and every step's window.
std::string obstacle(const RandomRun& run, const Budgets& budgets) {
  Config config = run.config();
  config.memory = {.device_bytes = budgets.device_bytes, .host_bytes = budgets.host_bytes};
  const Layout layout =
      plan_layout(config, run.model(), shard_of(config.sharding, 0, run.machine().ranks));
  try {
    const Placement placement = plan_run(config, run.model(), layout, run.machine()).placement;
    EXPECT_LE(placement.device_bytes(), budgets.device_bytes);
    EXPECT_LE(placement.host_bytes(), budgets.host_bytes);
    StepPlans plans(run.model(), layout, placement);
    const Config::Activations& largest = config.activations;
    (void)plans.training(largest.micro_batches, largest.order);
    (void)plans.activations(largest.micro_batches, largest.order);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory) << error.what();
    return error.what();
  }
  return "";
}

// The size behind `before`; nothing where it is not there.
std::optional<std::uint64_t> size_behind(const std::string& message, const std::string& before) {
  const std::size_t begin = message.find(before);
  if (begin == std::string::npos) return std::nullopt;
  const std::size_t size = message.find('"', begin) + 1;
  return parse_size(message.substr(size, message.find('"', size) - size));
}

// The budgets that a refusal of `budgets` names.
Budgets named_in(const std::string& message, const Budgets& budgets) {
  Budgets named = budgets;
  const auto smallest = size_behind(message, "the smallest that works is");
  EXPECT_TRUE(smallest) << message;
  (message.starts_with("memory.device") ? named.device_bytes : named.host_bytes) =
      smallest.value_or(0);
  if (const auto host = size_behind(message, ", with memory.host")) named.host_bytes = *host;
  return named;
}

// Leaves out a part of what `run` needs. Some of these budgets work all the same.
Budgets too_small(RandomRun& run) {
  Budgets budgets{.device_bytes = kLarge, .host_bytes = kLarge};
  const std::uint64_t kind = run.below(3);
  if (kind != 0) budgets.device_bytes = run.any_magnitude(3e6);
  if (kind != 1) budgets.host_bytes = run.any_magnitude(3e6);
  return budgets;
}

void expect_the_smallest(RandomRun& run, const Budgets& refused, const std::string& message) {
  const Budgets named = named_in(message, refused);
  EXPECT_EQ(obstacle(run, named), "") << message;
  for (std::uint64_t Budgets::*const budget : {&Budgets::device_bytes, &Budgets::host_bytes}) {
    if (named.*budget == refused.*budget) continue;
    Budgets less = named;
    less.*budget -= std::min(less.*budget, kPageBytes);
    EXPECT_NE(obstacle(run, less), "") << "a page less than " << message;
  }
  for (int i = 0; i < 20; ++i) {
    Budgets more = named;
    if (i % 3 != 0) more.device_bytes += run.any_magnitude(3e6);
    if (i % 3 != 1) more.host_bytes += run.any_magnitude(3e6);
    EXPECT_EQ(obstacle(run, more), "")
        << "device " << more.device_bytes << ", host " << more.host_bytes << " after " << message;
  }
}

TEST(Budgets, TheSizesNamedWorkAndLessDoesNotAndMoreDoes) {
  const Campaign seeds = campaign(1000);  // with --slow 50,000
  std::uint64_t refusals = 0;
  for (const std::uint64_t seed : seeds_of(seeds)) {
    RandomRun run(seed);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, run.describe()));
    for (int attempt = 0; attempt < 20; ++attempt) {
      const Budgets budgets = too_small(run);
      const std::string message = obstacle(run, budgets);
      if (message.empty()) continue;
      ++refusals;
      expect_the_smallest(run, budgets, message);
      break;
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(refusals * 10, seeds.cases * 9) << "cases that refuse nothing prove nothing";
}

}  // namespace
}  // namespace sluice::test
