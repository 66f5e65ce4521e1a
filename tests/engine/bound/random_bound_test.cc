// The bounds of random models: equal to those of an independent simulation, and never below the
// busy time of a resource.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "engine/bound/bound.h"
#include "tests/engine/bound/bound_model.h"
#include "tests/engine/bound/schedule_oracle.h"
#include "tests/support/campaign.h"

namespace sluice::test {
namespace {

constexpr OverlapPolicy kBoundPolicies[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                            OverlapPolicy::kEager, OverlapPolicy::kSpeculative};

double seconds(long ticks) {
  return 1e-6 * static_cast<double>(ticks);
}

// As many bytes as parameters.
void spill_gradients(std::mt19937_64& random, Placement& placement, OracleCase& given) {
  given.read_gradients = given.read_parameters;
  given.write_gradients = given.write_parameters;
  const std::uint64_t share = random() % 2 * (random() % 5);
  for (std::size_t unit = 0; unit < given.unit_blocks.size(); ++unit) {
    given.gradients_on_storage.push_back(!given.on_device[unit] && random() % 4 < share);
    if (given.gradients_on_storage[unit]) placement.gradient_tier[unit] = Tier::kNvme;
  }
  placement.gradient_staging.count =
      static_cast<std::uint32_t>(given.staging = 1 + static_cast<int>(random() % 4));
}

// Homes of parameters and records.
void choose_homes(std::mt19937_64& random, Placement& placement, OracleCase& given) {
  const std::uint64_t ram_share = random() % 3;
  const std::uint64_t device_share = random() % 2 * (random() % 5);
  for (const int blocks : given.unit_blocks) {
    const bool is_on_device = random() % 4 < device_share;
    if (is_on_device) placement.gradient_tier[given.on_device.size()] = Tier::kDevice;
    given.on_device.push_back(is_on_device);
    for (int i = 0; i < blocks; ++i) {
      const std::size_t block = given.record_in_ram.size();
      given.parameters_in_ram.push_back(is_on_device || random() % 4 < ram_share);
      given.record_in_ram.push_back(is_on_device || random() % 4 < ram_share);
      const Tier memory = is_on_device ? Tier::kDevice : Tier::kHost;
      placement.parameter_tier[block] = given.parameters_in_ram[block] ? memory : Tier::kNvme;
      placement.record_tier[block] = given.record_in_ram[block] ? memory : Tier::kNvme;
    }
  }
}

// Leases at home, for units whose parameters are all in host memory.
void unify(std::mt19937_64& random, BoundModel& model, OracleCase& given) {
  Placement& placement = model.placement;
  placement.is_unified = random() % 2 == 0;
  placement.leases_gradient_set = given.gradients_in_set = placement.is_unified;
  for (const UnitPlace& unit : model.layout.units()) {
    given.leased_at_home.push_back(
        placement.is_unified && std::ranges::all_of(model.layout.blocks_of(unit.id), [&](auto& b) {
          return placement.parameter_tier[index_of(b.id)] == Tier::kHost;
        }));
  }
  placement.is_leased_in_host = given.leased_at_home;
}

OracleCase random_case(std::mt19937_64& random, BoundModel& model) {
  const auto below = [&](long count) {
    return static_cast<long>(random() % static_cast<std::uint64_t>(count));
  };
  OracleCase given;
  for (const UnitPlace& unit : model.layout.units()) {
    given.unit_blocks.push_back(static_cast<int>(unit.block_count));
    given.forward.push_back(1 + below(60));
    given.backward.push_back(1 + below(120));
    model.rates.units[index_of(unit.id)] = {.forward_s = seconds(given.forward.back()),
                                            .backward_s = seconds(given.backward.back())};
  }
  Placement& placement = model.placement;
  choose_homes(random, placement, given);
  unify(random, model, given);
  model.window = plan_window(model.schedule, window_unit_bytes(model.layout, placement),
                             placement.window_bytes, 1);
  for (std::size_t use = 0; use < model.schedule.size(); ++use) {
    const WindowUse& place = model.window.uses[use];
    given.uses.push_back({.unit = static_cast<int>(index_of(model.schedule[use].unit)),
                          .is_backward = model.schedule[use].pass == Pass::kBackward,
                          .fetches = place.fetch,
                          .evicted_uses = {place.evicted_uses.begin(), place.evicted_uses.end()}});
  }
  Rates& rates = model.rates;
  const auto per_tick = [](double amount, long ticks) {
    return ticks == 0 ? 0 : amount * 1e6 / static_cast<double>(ticks);
  };
  given.read_parameters = 1 + below(12);
  given.write_parameters = 1 + below(12);
  given.read_record = 5 * given.read_parameters;
  given.write_record = 5 * given.write_parameters;
  rates.read_bytes_per_second = per_tick(kParameterBytes, given.read_parameters);
  rates.write_bytes_per_second = per_tick(kParameterBytes, given.write_parameters);
  given.half_duplex = below(2) == 0;
  rates.duplex = given.half_duplex ? Duplex::kHalf : Duplex::kFull;
  spill_gradients(random, placement, given);
  given.latency = below(2) * below(30);
  rates.latency_s = seconds(given.latency);
  given.copy_up = 1 + below(8);
  given.copy_down = below(2) * below(8);
  rates.up_bytes_per_second = per_tick(kParameterBytes, given.copy_up);
  rates.down_bytes_per_second = per_tick(kParameterBytes, given.copy_down);
  given.adam = 1 + below(40);
  given.norm = 1 + below(2) * below(60);
  rates.adam_parameters_per_second = per_tick(kBlockElements, given.adam);
  rates.norm_parameters_per_second = per_tick(kBlockElements, given.norm);
  given.device_adam = below(2) * below(40);
  rates.device_adam_parameters_per_second = per_tick(kBlockElements, given.device_adam);
  placement.lanes.count =
      static_cast<std::uint32_t>(given.lanes = 1 + static_cast<int>(below(below(3) == 0 ? 16 : 6)));
  const long prefetch_slots = 1 + below(8);
  given.slots = given.lanes + static_cast<int>(prefetch_slots);
  given.kept_slots = static_cast<int>(below(prefetch_slots));
  placement.parameter_slots.count = static_cast<std::uint32_t>(given.slots);
  placement.kept_slots = static_cast<std::uint32_t>(given.kept_slots);
  placement.gradient_slots.count =
      static_cast<std::uint32_t>(given.gradient_slots = 1 + static_cast<int>(below(3)));
  if (below(3) == 0) given.streamed = 1 + static_cast<int>(below(4));
  placement.streams_updates = given.streamed != 0;
  placement.update_staging.count = static_cast<std::uint32_t>(given.streamed);
  return given;
}

// To the tick: rates are made so that every time is a whole number of microseconds.
TEST(RandomBound, EqualsTheIndependentModel) {
  for (const std::uint64_t seed : seeds_of(campaign(100))) {
    std::mt19937_64 random(seed);
    std::vector<int> unit_blocks(2 + random() % 4);
    for (int& count : unit_blocks) count = 1 + static_cast<int>(random() % 3);
    BoundModel model(unit_blocks, 2 + random() % 4);
    OracleCase given = random_case(random, model);
    for (const OverlapPolicy policy : kBoundPolicies) {
      given.policy = policy;
      const std::vector<long> begins = step_begins(given, 9);
      const double expected_s = seconds(begins[7] - begins[3]) / 4;
      ASSERT_NEAR(model.step_s(policy), expected_s, 1e-12)
          << name_of(policy) << ", SLUICE_TEST_SEED=" << seed;
    }
  }
}

TEST(RandomBound, NoScheduleBeatsTheScarcestResource) {
  for (const std::uint64_t seed : seeds_of(campaign(100))) {
    std::mt19937_64 random(seed);
    BoundModel model(std::vector<int>(8 + random() % 8, 1 + static_cast<int>(random() % 3)));
    random_case(random, model);
    const double least_s = minimum_step(model.shape()).step_s;
    for (const OverlapPolicy policy : kBoundPolicies) {
      const StepCost cost = bound_step(model.shape(), policy);
      EXPECT_GE(cost.step_s, cost.busy(cost.scarcest()) * 0.98) << "SLUICE_TEST_SEED=" << seed;
      EXPECT_GE(cost.step_s, least_s * 0.98) << name_of(policy) << ", SLUICE_TEST_SEED=" << seed;
    }
  }
}

}  // namespace
}  // namespace sluice::test
