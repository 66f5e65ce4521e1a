// The simulated schedule comes to its end whatever rates are measured, also those of a machine
// under load, or 0: no job waits for a job that waits for it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "engine/bound/bound.h"
#include "tests/engine/bound/bound_model.h"
#include "tests/support/campaign.h"

namespace sluice {
namespace {

using test::BoundModel;

constexpr OverlapPolicy kEveryPolicy[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                          OverlapPolicy::kEager, OverlapPolicy::kSpeculative};

// Rates of any magnitude, some of them 0.
Rates any_rates(std::uint64_t seed, std::size_t unit_count) {
  std::mt19937_64 random(seed);
  const auto any = [&](double least, double most) {
    if (random() % 8 == 0) return 0.0;
    return least * std::pow(most / least, std::uniform_real_distribution<double>()(random));
  };
  Rates rates{.read_bytes_per_second = any(1e6, 1e10),
              .write_bytes_per_second = any(1e6, 1e10),
              .duplex = random() % 2 == 0 ? Duplex::kHalf : Duplex::kFull,
              .latency_s = any(1e-6, 1e-3),
              .up_bytes_per_second = any(1e6, 1e10),
              .down_bytes_per_second = any(1e6, 1e10),
              .adam_parameters_per_second = any(1e6, 1e10),
              .norm_parameters_per_second = any(1e6, 1e10),
              .units = {}};
  for (std::size_t unit = 0; unit < unit_count; ++unit)
    rates.units.push_back({.forward_s = any(1e-6, 1e-2), .backward_s = any(1e-6, 1e-2)});
  return rates;
}

void expect_an_end(BoundModel& model, const Rates& rates, std::uint64_t seed) {
  model.window = plan_window(model.schedule, window_unit_bytes(model.layout, model.placement),
                             model.placement.window_bytes, 1);
  model.rates = rates;
  for (const OverlapPolicy policy : kEveryPolicy) {
    SCOPED_TRACE(name_of(policy));
    const StepCost cost = bound_step(model.shape(), policy);
    EXPECT_GE(cost.step_s, 0) << "SLUICE_TEST_SEED=" << seed;
    EXPECT_GT(cost.traffic.nvme_write_bytes, 0u) << "SLUICE_TEST_SEED=" << seed;
  }
}

// Fetches for backward must not go past the unit on the device, which waits for an update that
// needs a slot: they take the slots that they share with the last updates. Half of the cases have a
// drive whose writes are far slower than everything else, so updates are late.
TEST(BoundProgress, FetchesLeaveASlotForTheUpdateThatTheyWaitFor) {
  for (const std::uint64_t seed : test::seeds_of(test::campaign(400))) {
    BoundModel model({5, 5, 5, 5, 5, 5, 1}, /*window_units=*/3);
    model.placement.parameter_tier.back() = Tier::kDevice;
    model.placement.lanes.count = 4;
    model.set_prefetch_slots(8);
    Rates rates = any_rates(seed, model.layout.units().size());
    if (seed % 2 == 0) {
      rates.read_bytes_per_second = rates.up_bytes_per_second = rates.down_bytes_per_second = 2e9;
      rates.adam_parameters_per_second = rates.norm_parameters_per_second = 5e8;
      rates.write_bytes_per_second = 3e7;
      rates.duplex = Duplex::kFull;
      rates.latency_s = 0;
    }
    expect_an_end(model, rates, seed);
  }
}

// The norm is known before the last uses, which are those of frozen units, are computed.
TEST(BoundProgress, AStepEndsAfterTheUsesOfFrozenUnits) {
  for (const std::uint64_t seed : test::seeds_of(test::campaign(100))) {
    BoundModel model({1, 1, 1}, /*window_units=*/2, /*frozen_units=*/2);
    model.placement.lanes.count = 1;
    model.set_prefetch_slots(2);
    expect_an_end(model, any_rates(seed, model.layout.units().size()), seed);
  }
}

// In more nanoseconds than 64 bits count: the schedule is that of a step of milliseconds.
TEST(BoundProgress, AStepMayTakeLongerThanNanosecondsAreCounted) {
  for (const OverlapPolicy policy : kEveryPolicy) {
    const auto step_s = [&](double longer) {
      BoundModel model({2, 3, 1, 2});
      model.set_compute(0.003 * longer, 0.007 * longer);
      Rates& rates = model.rates;
      rates.read_bytes_per_second = rates.write_bytes_per_second = 4e6 / longer;
      rates.latency_s = 1e-4 * longer;
      rates.up_bytes_per_second = rates.down_bytes_per_second = 8e6 / longer;
      rates.adam_parameters_per_second = 4e6 / longer;
      return bound_step(model.shape(), policy).step_s;
    };
    const double short_s = step_s(1);
    EXPECT_GT(short_s, 0.04);
    for (const double longer : {0x1p20, 0x1p40, 0x1p90})
      EXPECT_NEAR(step_s(longer) / (longer * short_s), 1, 1e-9) << name_of(policy) << longer;
  }
}

// A gradient is home when the call that sends it returns.
TEST(BoundProgress, GradientsGoToStorageInNoTime) {
  BoundModel model({2, 2});
  model.set_tiers(Tier::kHost, Tier::kHost);
  std::ranges::fill(model.placement.gradient_tier, Tier::kNvme);
  model.placement.gradient_staging.count = 2;
  model.schedule = training_schedule(model.spec, 2);
  model.window = plan_window(model.schedule, window_unit_bytes(model.layout, model.placement),
                             model.placement.window_bytes, 1);
  model.set_compute(1e-3, 1e-3);
  const Traffic at_once = bound_step(model.shape(), OverlapPolicy::kSerial).traffic;
  model.rates.read_bytes_per_second = model.rates.write_bytes_per_second = 1e9;
  model.rates.down_bytes_per_second = model.rates.norm_parameters_per_second = 1e9;
  const Traffic in_time = bound_step(model.shape(), OverlapPolicy::kSerial).traffic;
  EXPECT_EQ(at_once.nvme_read_bytes, in_time.nvme_read_bytes);
  EXPECT_EQ(at_once.nvme_write_bytes, in_time.nvme_write_bytes);
}

}  // namespace
}  // namespace sluice
