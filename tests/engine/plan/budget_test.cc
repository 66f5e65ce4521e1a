// The sizes that a refusal names work, a page less does not, and every larger one does: of models,
// ranks, homes and steps of all kinds.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/parameter_groups.h"
#include "engine/plan/sharding.h"
#include "engine/plan/step_plans.h"
#include "tests/support/campaign.h"

namespace sluice {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kLarge = std::uint64_t{1} << 40;

class RandomRun {
 public:
  explicit RandomRun(std::uint64_t seed) : random_(seed) {
    make_model();
    make_config();
    layout_.emplace(model_, state_format(config_), config_.storage.block_elements,
                    std::span<const std::uint32_t>(), shard_of(config_.sharding, 0, ranks_));
  }

  // Why the budgets do not work, nothing when they do: places and every step's window.
  std::string obstacle(const Budgets& budgets) const {
    try {
      const Placement placement =
          plan_placement(*layout_, model_, config_.placement, budgets,
                         pass_needs(config_, *layout_, ranks_, fills_device_));
      EXPECT_LE(placement.device_bytes(), budgets.device_bytes);
      EXPECT_LE(placement.host_bytes(), budgets.host_bytes);
      StepPlans plans(model_, *layout_, placement);
      const Config::Activations& largest = config_.activations;
      (void)plans.training(largest.micro_batches, largest.order);
      (void)plans.activations(largest.micro_batches, largest.order);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory) << error.what();
      return error.what();
    }
    return "";
  }

  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }
  bool one_in(std::uint64_t count) { return below(count) == 0; }
  // From 1 byte to `most`, any magnitude.
  std::uint64_t any_magnitude(double most) {
    return static_cast<std::uint64_t>(
        std::exp2(std::uniform_real_distribution<double>(0, std::log2(most))(random_)));
  }
  std::string describe() const {
    return fmt::format("{} units, {} ranks, group {}, stage {}, leases {}, micro-batches {}",
                       model_.units.size(), ranks_, config_.sharding.group_ranks,
                       config_.sharding.stage, model_.concurrent_leases,
                       config_.activations.micro_batches);
  }

 private:
  template <class T>
  T any_of(std::initializer_list<T> values) {
    return values.begin()[below(values.size())];
  }

  void make_model() {
    const std::uint64_t units = 1 + below(8);
    const bool are_equal = one_in(3);
    const std::uint64_t size = any_magnitude(200'000);
    bool may_freeze = units > 1 && one_in(3);
    for (std::uint64_t unit = 0; unit < units; ++unit) {
      const std::string name = "u" + std::to_string(unit);
      model_.units.push_back(
          {.name = name,
           .tensors = {{.name = name + ".w", .shape = {are_equal ? size : any_magnitude(2e5)}}},
           .is_frozen = may_freeze && unit + 1 < units && one_in(2)});
      model_.forward_order.push_back(UnitId{static_cast<std::uint32_t>(unit)});
    }
    if (one_in(3)) model_.forward_order.push_back(UnitId{0});
    model_.concurrent_leases = 1 + static_cast<std::uint32_t>(below(4));
    config_.activations.home = any_of({ActivationHome::kKeep, ActivationHome::kRecompute,
                                       ActivationHome::kHost, ActivationHome::kNvme});
    if (config_.activations.home != ActivationHome::kKeep)
      model_.boundary_bytes.assign(model_.forward_order.size() - 1, any_magnitude(3e5));
    model_ = validated(model_);
    config_.activations.micro_batches = 1 + static_cast<std::uint32_t>(below(4));
    if (one_in(2) && config_.activations.home != ActivationHome::kKeep)
      config_.activations.order = MicroBatchOrder::kVertical;
  }

  void make_config() {
    ranks_ = any_of({1u, 1u, 2u, 3u, 4u, 6u});
    config_.sharding.stage = static_cast<std::uint32_t>(below(4));
    config_.sharding.keep_gathered_bytes = any_of<std::uint64_t>({0, 4096, 65536, 262144});
    if (one_in(2)) config_.sharding.group_ranks = any_of({1u, 2u, ranks_});
    if (ranks_ % std::max(1u, config_.sharding.group_ranks) != 0) config_.sharding.group_ranks = 0;
    config_.storage.block_elements = any_of<std::uint64_t>({4096, 16384, 65536});
    config_.optimizer.overlap = any_of({OverlapPolicy::kSerial, OverlapPolicy::kDeferred});
    config_.optimizer.kind = any_of({OptimizerKind::kAdamW, OptimizerKind::kLion});
    if (one_in(4)) config_.optimizer.lanes = 1 + static_cast<std::uint32_t>(below(9));
    config_.precision.parameters = any_of({DType::kBf16, DType::kFp32, DType::kFp16});
    config_.precision.gradients = one_in(4) ? DType::kFp32 : config_.precision.parameters;
    fills_device_ = one_in(2);
    using enum TierChoice;
    while (true) {
      config_.placement = {.parameters = any_of({kAuto, kAuto, kDevice, kHost, kNvme}),
                           .optimizer = any_of({kAuto, kAuto, kDevice, kHost, kNvme}),
                           .gradients = any_of({kAuto, kAuto, kDevice, kHost, kNvme})};
      try {
        validate(config_);
        check_homes(config_.sharding, ranks_, config_.placement);
        return;
      } catch (const Error&) {
        continue;  // homes that do not go together
      }
    }
  }

  std::mt19937_64 random_;
  ModelSpec model_;
  Config config_;
  std::uint32_t ranks_ = 1;
  bool fills_device_ = false;
  std::optional<Layout> layout_;
};

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

// Of what `run` needs, some is left out. Some of these budgets work all the same.
Budgets too_small(RandomRun& run) {
  Budgets budgets{.device_bytes = kLarge, .host_bytes = kLarge};
  const std::uint64_t kind = run.below(3);
  if (kind != 0) budgets.device_bytes = run.any_magnitude(3e6);
  if (kind != 1) budgets.host_bytes = run.any_magnitude(3e6);
  return budgets;
}

void expect_the_smallest(RandomRun& run, const Budgets& refused, const std::string& message) {
  const Budgets named = named_in(message, refused);
  EXPECT_EQ(run.obstacle(named), "") << message;
  for (std::uint64_t Budgets::*const budget : {&Budgets::device_bytes, &Budgets::host_bytes}) {
    if (named.*budget == refused.*budget) continue;
    Budgets less = named;
    less.*budget -= std::min(less.*budget, kPage);
    EXPECT_NE(run.obstacle(less), "") << "a page less than " << message;
  }
  for (int i = 0; i < 20; ++i) {
    Budgets more = named;
    if (i % 3 != 0) more.device_bytes += run.any_magnitude(3e6);
    if (i % 3 != 1) more.host_bytes += run.any_magnitude(3e6);
    EXPECT_EQ(run.obstacle(more), "")
        << "device " << more.device_bytes << ", host " << more.host_bytes << " after " << message;
  }
}

TEST(Budgets, TheSizesNamedWorkAndLessDoesNotAndMoreDoes) {
  const test::Campaign seeds = test::campaign(150);
  std::uint64_t refusals = 0;
  for (std::uint64_t seed = seeds.first_seed; seed < seeds.first_seed + seeds.cases; ++seed) {
    RandomRun run(seed);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, run.describe()));
    for (int attempt = 0; attempt < 20; ++attempt) {
      const Budgets budgets = too_small(run);
      const std::string message = run.obstacle(budgets);
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
}  // namespace sluice
