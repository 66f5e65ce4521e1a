// The bounds of steps that announce units or leave units untouched, against those of models that
// have only the units in use.
#include <gtest/gtest.h>

#include "engine/bound/planned_step.h"
#include "tests/engine/bound/bound_model.h"

namespace sluice::test {
namespace {

constexpr OverlapPolicy kAllPolicies[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                          OverlapPolicy::kEager, OverlapPolicy::kSpeculative};

void set_rates(BoundModel& model) {
  model.rates.read_bytes_per_second = model.rates.write_bytes_per_second = 1e9;
  model.rates.up_bytes_per_second = model.rates.down_bytes_per_second = 8e9;
  model.rates.adam_parameters_per_second = 1e9;
  model.rates.norm_parameters_per_second = 2e9;
  model.set_compute(20e-6, 40e-6);
}

void expect_equal(const StepCost& actual, const StepCost& expected, OverlapPolicy policy) {
  EXPECT_DOUBLE_EQ(actual.step_s, expected.step_s) << name_of(policy);
  for (std::size_t i = 0; i < kResourceCount; ++i)
    EXPECT_NEAR(actual.busy_s[i], expected.busy_s[i], 1e-12) << name_of(policy);
  EXPECT_EQ(actual.traffic.nvme_read_bytes, expected.traffic.nvme_read_bytes) << name_of(policy);
  EXPECT_EQ(actual.traffic.nvme_write_bytes, expected.traffic.nvme_write_bytes) << name_of(policy);
}

// The last unit has no use.
TEST(AnnouncedBound, UnitsThatStayCostNothing) {
  BoundModel used({2, 1, 3});
  BoundModel model({2, 1, 3, 4});
  set_rates(used);
  set_rates(model);
  model.schedule = used.schedule;
  model.window = used.window;
  for (const std::uint32_t copies : {0u, 2u}) {
    used.placement.durable_copies = model.placement.durable_copies = copies;
    for (const OverlapPolicy policy : kAllPolicies) {
      model.placement.skips_untouched = true;
      const StepCost stays = bound_step(model.shape(), policy);
      expect_equal(stays, bound_step(used.shape(), policy), policy);
      model.placement.skips_untouched = false;
      const StepCost updated = bound_step(model.shape(), policy);
      EXPECT_EQ(updated.traffic.nvme_write_bytes,
                stays.traffic.nvme_write_bytes + 4 * (kParameterBytes + kRecordBytes))
          << name_of(policy);
      EXPECT_GT(updated.step_s, stays.step_s) << name_of(policy);
    }
  }
}

// Two experts, of which each step uses the second one after the first two units.
TEST(AnnouncedBound, AnnouncedUsesAreUsesOfTheStep) {
  BoundModel plain({2, 1, 1}, 4);
  BoundModel model({2, 1, 1, 1}, 4);
  set_rates(plain);
  set_rates(model);
  model.spec.units[2].is_announced = model.spec.units[3].is_announced = true;
  model.spec.forward_order = {UnitId{0}, UnitId{1}};
  model.spec.backward_order = {UnitId{1}, UnitId{0}};
  const Layout layout(validated(model.spec), {}, kBlockElements);
  model.placement.skips_untouched = true;
  model.placement.announced_window = {.count = 1, .slot_bytes = kParameterBytes};
  const PlannedAnnouncement announcements[] = {
      {.before_use = 2, .pass = Pass::kForward, .units = {UnitId{3}}},
      {.before_use = 2, .pass = Pass::kBackward, .units = {UnitId{3}}}};
  const PlannedStep planned({.model = model.spec}, layout, model.placement, 1, announcements);
  const StepShape shape = planned.shape(model.rates);
  Schedule expected = plain.schedule;
  ASSERT_EQ(shape.schedule.size(), expected.size());
  for (std::size_t use = 0; use < expected.size(); ++use) {
    const std::uint32_t unit = index_of(expected[use].unit);
    EXPECT_EQ(index_of(shape.schedule[use].unit), unit == 2 ? 3u : unit);
    EXPECT_EQ(shape.schedule[use].pass, expected[use].pass);
    EXPECT_EQ(shape.schedule[use].first_gradient, expected[use].first_gradient);
    EXPECT_EQ(shape.schedule[use].final_gradient, expected[use].final_gradient);
    EXPECT_EQ(shape.window.uses[use].fetch, plain.window.uses[use].fetch) << use;
  }
  for (const OverlapPolicy policy : kAllPolicies) {
    const StepCost cost = bound_step(shape, policy);
    const StepCost known = bound_step(plain.shape(), policy);
    EXPECT_EQ(cost.traffic.nvme_write_bytes, known.traffic.nvme_write_bytes) << name_of(policy);
    EXPECT_GE(cost.traffic.nvme_read_bytes, known.traffic.nvme_read_bytes) << name_of(policy);
  }
  EXPECT_EQ(bound_step(shape, OverlapPolicy::kSerial).traffic.nvme_read_bytes,
            bound_step(plain.shape(), OverlapPolicy::kSerial).traffic.nvme_read_bytes);
}

// Under "lazy", an expert that has missed updates is read and written once more, and its arithmetic
// is that of all of them.
TEST(AnnouncedBound, LateUnitsMakeUpForWhatTheyMissed) {
  BoundModel model({2, 1, 3}, 4);
  set_rates(model);
  model.rates.host_memory_bytes_per_second = 100e9;
  model.spec.units[2].is_announced = true;
  model.spec.forward_order = {UnitId{0}, UnitId{1}};
  model.spec.backward_order = {UnitId{1}, UnitId{0}};
  const Layout layout(validated(model.spec), {}, kBlockElements);
  model.placement.announced_window = {.count = 1, .slot_bytes = 3 * kParameterBytes};
  const auto cost_of = [&](bool is_lazy, std::uint32_t missed, OverlapPolicy policy) {
    model.placement.is_lazy = is_lazy;
    const PlannedAnnouncement announcements[] = {
        {.before_use = 2, .pass = Pass::kForward, .units = {UnitId{2}}, .missed_updates = missed},
        {.before_use = 2, .pass = Pass::kBackward, .units = {UnitId{2}}, .missed_updates = missed}};
    const PlannedStep planned({.model = model.spec}, layout, model.placement, 1, announcements);
    return bound_step(planned.shape(model.rates), policy);
  };
  for (const OverlapPolicy policy : kAllPolicies) {
    SCOPED_TRACE(name_of(policy));
    const StepCost known = cost_of(true, 0, policy);
    const StepCost late = cost_of(true, 7, policy);
    EXPECT_EQ(late.traffic.nvme_read_bytes, known.traffic.nvme_read_bytes + 3 * kRecordBytes);
    EXPECT_EQ(late.traffic.nvme_write_bytes,
              known.traffic.nvme_write_bytes + 3 * (kParameterBytes + kRecordBytes));
    EXPECT_NEAR(late.busy(Resource::kCpu) - known.busy(Resource::kCpu),
                7 * 3 * kBlockElements / 1e9, 1e-12);
    EXPECT_NEAR(late.busy(Resource::kHostMemory) - known.busy(Resource::kHostMemory),
                (3 * (kParameterBytes + 2 * kRecordBytes) + 3 * 26 * kBlockElements) / 100e9, 1e-12)
        << "storage, and one update: 14 bytes read and 12 written for an element";
    EXPECT_NEAR(late.busy(Resource::kStorageWrite),
                known.busy(Resource::kStorageWrite) + 3 * (kParameterBytes + kRecordBytes) / 1e9,
                1e-12);
    EXPECT_GE(late.step_s, late.busy(late.scarcest()));
    expect_equal(cost_of(false, 7, policy), cost_of(false, 0, policy), policy);
  }
  // With so many missed updates, the arithmetic is what the step waits for.
  const StepCost many = cost_of(true, 1'000'000, OverlapPolicy::kDeferred);
  EXPECT_EQ(many.scarcest(), Resource::kCpu);
  EXPECT_DOUBLE_EQ(many.step_s, many.busy(Resource::kCpu));
}

// Only copies and computation take time. The first unit's two blocks are copied before anything is
// computed, and the expert's block as soon as it is announced.
TEST(AnnouncedBound, AFetchBeginsWithTheAnnouncement) {
  BoundModel model({2, 1, 1}, 4);
  model.spec.units[2].is_announced = true;
  model.spec.forward_order = {UnitId{0}, UnitId{1}};
  model.spec.backward_order = {UnitId{1}, UnitId{0}};
  const Layout layout(validated(model.spec), {}, kBlockElements);
  model.set_tiers(Tier::kHost, Tier::kHost);
  model.set_compute(1, 1);
  const double copy_s = 0.25;
  model.rates.up_bytes_per_second = static_cast<double>(kParameterBytes) / copy_s;
  model.placement.announced_window = {.count = 1, .slot_bytes = kParameterBytes};
  for (const std::uint32_t announced_before : {2u, 1u}) {
    const PlannedAnnouncement announcements[] = {{.before_use = 2,
                                                  .announced_before = announced_before,
                                                  .pass = Pass::kForward,
                                                  .units = {UnitId{2}}},
                                                 {.before_use = 2,
                                                  .announced_before = announced_before,
                                                  .pass = Pass::kBackward,
                                                  .units = {UnitId{2}}}};
    const PlannedStep planned({.model = model.spec}, layout, model.placement, 1, announcements);
    EXPECT_NEAR(bound_step(planned.shape(model.rates), OverlapPolicy::kSerial).step_s,
                6 + 2 * copy_s + (announced_before == 2 ? copy_s : 0), 1e-9)
        << announced_before;
  }
}

// With one place, each use of another expert evicts the one before, by its number in the step.
TEST(AnnouncedBound, EvictionsNameTheUsesOfTheStep) {
  BoundModel model({1, 1, 1}, 4);
  model.spec.units[1].is_announced = model.spec.units[2].is_announced = true;
  model.spec.forward_order = model.spec.backward_order = {UnitId{0}};
  const Layout layout(validated(model.spec), {}, kBlockElements);
  model.placement.announced_window = {.count = 1, .slot_bytes = kParameterBytes};
  const PlannedAnnouncement announcements[] = {
      {.before_use = 1, .pass = Pass::kForward, .units = {UnitId{1}, UnitId{2}}},
      {.before_use = 2, .pass = Pass::kBackward, .units = {UnitId{1}}}};
  const PlannedStep planned({.model = model.spec}, layout, model.placement, 1, announcements);
  const StepShape shape = planned.shape(model.rates);
  // 0 forward, 1 forward, 2 forward, 0 backward, 1 backward
  ASSERT_EQ(shape.schedule.size(), 5u);
  EXPECT_EQ(index_of(shape.schedule[3].unit), 0u);
  EXPECT_TRUE(shape.window.uses[1].evicted_uses.empty());
  EXPECT_EQ(shape.window.uses[2].evicted_uses, std::vector<std::uint32_t>{1});
  EXPECT_EQ(shape.window.uses[4].evicted_uses, std::vector<std::uint32_t>{2});
}

// A shared and a local expert in turn. Each has a place of its own, and the fetch of one waits for
// no copy of the other. With one place for both, each use evicts the other's unit.
TEST(AnnouncedBound, LocalUnitsHavePlacesOfTheirOwn) {
  BoundModel model({1, 1, 1}, 4);
  set_rates(model);
  model.spec.units[1].is_announced = model.spec.units[2].is_announced = true;
  model.spec.units[2].is_local = true;
  model.spec.forward_order = model.spec.backward_order = {UnitId{0}};
  const Layout layout(validated(model.spec), {}, kBlockElements);
  const PlannedAnnouncement announcements[] = {
      {.before_use = 1, .pass = Pass::kForward, .units = {UnitId{1}}},
      {.before_use = 1, .pass = Pass::kForward, .units = {UnitId{2}}},
      {.before_use = 1, .pass = Pass::kBackward, .units = {UnitId{1}}},
      {.before_use = 1, .pass = Pass::kBackward, .units = {UnitId{2}}}};
  std::vector<std::uint64_t> read_bytes;
  for (const bool splits : {true, false}) {
    model.placement.splits_announced_window = splits;
    model.placement.announced_window = {.count = splits ? 2u : 1u, .slot_bytes = kParameterBytes};
    const PlannedStep planned({.model = model.spec}, layout, model.placement, 1, announcements);
    const StepShape shape = planned.shape(model.rates);
    ASSERT_EQ(shape.schedule.size(), 6u);
    for (std::uint32_t use = 1; use < 5; ++use) {
      const WindowUse& planned_use = shape.window.uses[use];
      EXPECT_EQ(planned_use.fetch, !splits || use <= 2) << use;
      EXPECT_EQ(planned_use.offset_bytes, splits && use % 2 == 0 ? kParameterBytes : 0) << use;
      EXPECT_EQ(planned_use.evicted_uses.empty(), splits || use == 1) << use;
    }
    for (const OverlapPolicy policy : kAllPolicies) {
      const StepCost cost = bound_step(shape, policy);
      EXPECT_GT(cost.step_s, 0) << name_of(policy);
      if (policy == OverlapPolicy::kSerial) read_bytes.push_back(cost.traffic.nvme_read_bytes);
    }
  }
  EXPECT_GT(read_bytes[1], read_bytes[0]);
}

}  // namespace
}  // namespace sluice::test
