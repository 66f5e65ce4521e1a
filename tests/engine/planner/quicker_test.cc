// Nothing that a plan has looked at is quicker than the config without being named, and what is
// named gives the step that is promised: of configs, budgets, rates and policies of all kinds.
#include "engine/planner/quicker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <sstream>
#include <vector>

#include <sluice/config_document.h>
#include <sluice/error.h>
#include "base/at_once.h"
#include "tests/support/campaign.h"

namespace sluice {
namespace {

class RandomPlan {
 public:
  explicit RandomPlan(std::uint64_t seed) : random_(seed) {
    const std::uint64_t units = 2 + below(7);
    double parameters = 0;
    for (std::uint64_t unit = 0; unit < units; ++unit) {
      const std::string name = "u" + std::to_string(unit);
      const auto elements = static_cast<std::uint64_t>(any_magnitude(2e4, 4e5));
      request.model.units.push_back(
          {.name = name, .tensors = {{.name = name + ".w", .shape = {elements}}}});
      request.model.forward_order.push_back(UnitId{static_cast<std::uint32_t>(unit)});
      request.forward_flops.push_back(static_cast<double>(elements) * any_magnitude(10, 1e4));
      parameters += static_cast<double>(elements);
    }
    request.run_each = for_each_at_once;
    request.micro_batches = 1 + static_cast<std::uint32_t>(below(3));
    request.flops = any_magnitude(1e10, 1e12);
    request.machine.device_is_host = below(2) == 0;
    request.rates = {.read_bytes_per_second = any_magnitude(3e8, 1e10),
                     .write_bytes_per_second = any_magnitude(3e8, 1e10),
                     .duplex = below(2) == 0 ? Duplex::kHalf : Duplex::kFull,
                     .latency_s = 1e-4,
                     .up_bytes_per_second = any_magnitude(1e9, 3e10),
                     .down_bytes_per_second = any_magnitude(1e9, 3e10),
                     .adam_parameters_per_second = any_magnitude(1e8, 3e9),
                     .norm_parameters_per_second = any_magnitude(1e9, 1e10),
                     .device_adam_parameters_per_second = any_magnitude(1e9, 6e10),
                     .units = {}};
    Config& config = request.config;
    config.storage.block_elements = 4096 << below(4);
    using enum TierChoice;
    config.placement = {.parameters = any_of({kAuto, kAuto, kDevice, kHost, kNvme}),
                        .optimizer = any_of({kAuto, kAuto, kHost, kNvme}),
                        .gradients = any_of({kAuto, kAuto, kAuto, kHost})};
    config.optimizer.overlap =
        any_of({OverlapPolicy::kAuto, OverlapPolicy::kAuto, OverlapPolicy::kSerial,
                OverlapPolicy::kDeferred, OverlapPolicy::kSpeculative});
    config.optimizer.clip_norm = below(3) == 0 ? 0 : 1;
    config.memory.device_bytes = static_cast<std::uint64_t>(parameters * any_magnitude(1.5, 20));
    config.memory.host_bytes = static_cast<std::uint64_t>(parameters * any_magnitude(3, 30));
    config.optimizer.update_on = any_of({UpdateProcessor::kCpu, UpdateProcessor::kDevice});
  }

  PlanRequest request;

 private:
  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }
  double any_magnitude(double least, double most) {
    return std::exp2(
        std::uniform_real_distribution<double>(std::log2(least), std::log2(most))(random_));
  }
  template <class T>
  T any_of(std::initializer_list<T> values) {
    return values.begin()[below(values.size())];
  }

  std::mt19937_64 random_;
};

// With `settings` as they would stand on the command line.
void apply(const std::string& settings, Config& config) {
  // eager is named where nothing is clipped
  ConfigDocument document(R"({"optimizer": {"clip_norm": 0}})", "settings");
  std::istringstream words(settings);
  for (std::string word; words >> word;) {
    document.set(word);
    const Config set = engine_config(document);
    if (word.starts_with("placement.parameters="))
      config.placement.parameters = set.placement.parameters;
    if (word.starts_with("placement.optimizer="))
      config.placement.optimizer = set.placement.optimizer;
    if (word.starts_with("placement.gradients="))
      config.placement.gradients = set.placement.gradients;
    if (word.starts_with("optimizer.overlap=")) config.optimizer.overlap = set.optimizer.overlap;
    if (word.starts_with("optimizer.update_on="))
      config.optimizer.update_on = set.optimizer.update_on;
  }
}

TEST(Quicker, NothingIsQuickerWithoutBeingNamedAndWhatIsNamedKeepsItsPromise) {
  int fitting = 0;
  int rows = 0;
  int policies = 0;
  int processors = 0;
  for (const std::uint64_t seed : test::seeds_of(test::campaign(150))) {
    PlanRequest request = RandomPlan(seed).request;
    const auto all = plan_alternatives(request);
    const PlannedPlacement& own = all.front();
    const auto quicker = quicker_than(all, request.config);
    if (!own.obstacle.empty()) {
      EXPECT_FALSE(quicker) << seed;
      continue;
    }
    ++fitting;
    double least_s = own.step.step_s;
    for (const PlannedPlacement& planned : all)
      if (planned.obstacle.empty()) least_s = std::min(least_s, planned.step.step_s);
    const bool may_be_eager = request.config.optimizer.clip_norm == 0;
    for (const PlannedChange& change : own.policies)
      if (change.policy != OverlapPolicy::kEager || may_be_eager)
        least_s = std::min(least_s, change.step.step_s);
    if (own.on_other_processor) least_s = std::min(least_s, own.on_other_processor->step.step_s);
    if (!quicker) {
      EXPECT_GE(least_s, 0.995 * own.step.step_s) << "seed " << seed;
      continue;
    }
    EXPECT_EQ(quicker->step_s, least_s) << "seed " << seed;
    EXPECT_LT(quicker->step_s, 0.995 * own.step.step_s) << "seed " << seed;
    const bool is_processor = quicker->update_on != request.config.optimizer.update_on;
    const bool is_policy = quicker->overlap != request.config.optimizer.overlap;
    ++(is_processor ? processors : is_policy ? policies : rows);
    const std::string settings = settings_of(*quicker, request.config);
    apply(settings, request.config);
    const auto better = plan_alternatives(request);
    ASSERT_EQ(better.front().obstacle, "") << "seed " << seed << ": " << settings;
    EXPECT_NEAR(better.front().step.step_s / least_s, 1, 1e-9)
        << "seed " << seed << ": " << settings;
  }
  // No kind is a rare exception that the cases above might not have had.
  EXPECT_GT(fitting, 50);
  EXPECT_GT(rows, 5);
  EXPECT_GT(policies, 5);
  EXPECT_GT(processors, 5);
}

// The planner makes its calls through the request's runner alone, and their order changes nothing.
TEST(PlanAlternatives, AreTheSameUnderEveryRunner) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    PlanRequest request = RandomPlan(seed).request;
    const auto at_once = plan_alternatives(request);
    request.run_each = run_in_turn;
    const auto in_turn = plan_alternatives(request);
    std::vector<std::size_t> counts;
    request.run_each = [&](std::size_t count, const std::function<void(std::size_t)>& run) {
      counts.push_back(count);
      for (std::size_t i = count; i > 0; --i) run(i - 1);
    };
    const auto backwards = plan_alternatives(request);
    // The placements, the config's own under each policy if it fits, and the simulations.
    ASSERT_EQ(counts.size(), in_turn.front().obstacle.empty() ? 3u : 2u);
    EXPECT_EQ(counts.front(), in_turn.size());
    for (const auto* other : {&at_once, &backwards}) {
      ASSERT_EQ(other->size(), in_turn.size());
      for (std::size_t i = 0; i < in_turn.size(); ++i) {
        EXPECT_EQ((*other)[i].obstacle, in_turn[i].obstacle) << "seed " << seed;
        EXPECT_EQ((*other)[i].placement, in_turn[i].placement) << "seed " << seed;
        EXPECT_EQ((*other)[i].step.step_s, in_turn[i].step.step_s) << "seed " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace sluice
