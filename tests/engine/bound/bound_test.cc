#include "engine/bound/bound.h"

#include <algorithm>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/engine/bound/bound_model.h"

namespace sluice {
namespace {

using test::kBlockElements;
using test::kParameterBytes;
using test::kRecordBytes;
using Model = test::BoundModel;

Traffic predict(const Model& model) {
  return predict_step_traffic(model.layout, model.placement, model.schedule, model.window);
}

constexpr OverlapPolicy kPolicies[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                       OverlapPolicy::kEager, OverlapPolicy::kSpeculative};

constexpr double kTiny = 1e-9;  // times are rounded to nanoseconds

TEST(Bound, CostsComputationWhenAllElseIsFree) {
  Model model({2, 3, 1, 2});
  model.set_compute(0.010, 0.020);
  for (const OverlapPolicy policy : kPolicies) {
    const StepCost cost = bound_step(model.shape(), policy);
    EXPECT_NEAR(cost.step_s, 4 * 0.030, kTiny) << name_of(policy);
    EXPECT_EQ(cost.scarcest(), Resource::kCompute);
  }
  model.schedule = training_schedule(model.spec, 3);
  model.window = plan_window(model.schedule, window_unit_bytes(model.layout, model.placement),
                             model.placement.window_bytes, 1);
  EXPECT_NEAR(model.step_s(OverlapPolicy::kDeferred), 3 * 4 * 0.030, kTiny);
}

// One drive that does nothing but move bytes, in all policies; `serial` moves every parameter once
// more than the others.
TEST(Bound, CostsTheDriveWhenAllElseIsFree) {
  Model model(std::vector<int>(20, 2));
  model.rates.read_bytes_per_second = 1e9;
  model.rates.write_bytes_per_second = 2e9;
  model.rates.duplex = Duplex::kHalf;
  constexpr double kCount = 40 * kBlockElements;
  for (const OverlapPolicy policy : kPolicies) {
    const StepCost cost = bound_step(model.shape(), policy);
    const auto read = static_cast<double>(cost.traffic.nvme_read_bytes);
    EXPECT_EQ(cost.traffic.nvme_write_bytes, 12 * kCount) << name_of(policy);
    EXPECT_NEAR(cost.step_s, read / 1e9 + 12 * kCount / 2e9, 1e-7) << name_of(policy);
    EXPECT_EQ(cost.scarcest(), Resource::kStorage);
    // The window keeps one or two units over the turn, and lanes carry some parameters.
    if (policy == OverlapPolicy::kSerial) {
      EXPECT_EQ(read, predict(model).nvme_read_bytes);
      EXPECT_GE(read, 15.7 * kCount);
    } else {
      EXPECT_GE(read, 13.0 * kCount) << name_of(policy);
      EXPECT_LE(read, 14.0 * kCount) << name_of(policy);
    }
  }
  model.rates.duplex = Duplex::kFull;
  const StepCost least = minimum_step(model.shape());
  EXPECT_EQ(least.scarcest(), Resource::kStorageRead);
  EXPECT_NEAR(least.step_s, static_cast<double>(least.traffic.nvme_read_bytes) / 1e9, 1e-7);
  EXPECT_NEAR(least.busy(Resource::kStorageWrite), 12 * kCount / 2e9, 1e-7);
}

// All in memory, 2 ms of Adam a block. `deferred`: the pass takes 40 ms, computation follows it
// unit by unit, and after the last one come its forward and all of backward.
TEST(Bound, CostsAdamWhenStateIsInMemory) {
  Model model(std::vector<int>(10, 2));
  model.set_tiers(Tier::kHost, Tier::kHost);
  model.set_compute(0.001, 0.002);
  model.rates.adam_parameters_per_second = kBlockElements / 0.002;
  EXPECT_NEAR(model.step_s(OverlapPolicy::kSerial), 0.040 + 10 * 0.003, kTiny);
  EXPECT_NEAR(model.step_s(OverlapPolicy::kDeferred), 0.040 + 0.001 + 10 * 0.002, kTiny);
  // 9 of 20 blocks are updated while gradients come, from the last unit down. The other 11 take
  // 22 ms in unit order, with forward close behind; its last unit of them and four more follow.
  EXPECT_NEAR(model.step_s(OverlapPolicy::kEager), 0.022 + 5 * 0.001 + 10 * 0.002, kTiny);
  EXPECT_EQ(bound_step(model.shape(), OverlapPolicy::kEager).traffic.nvme_read_bytes, 0u);
  // At home in memory, nothing is speculated.
  EXPECT_EQ(model.step_s(OverlapPolicy::kSpeculative), model.step_s(OverlapPolicy::kDeferred));
}

// `serial` with one lane: nothing of the pass overlaps.
TEST(Bound, OneLaneReadsUpdatesAndWritesInTurn) {
  Model model(std::vector<int>(8, 1));
  model.placement.lanes.count = 1;
  model.set_prefetch_slots(8);
  model.rates.read_bytes_per_second = kParameterBytes / 0.001;
  model.rates.write_bytes_per_second = kParameterBytes / 0.001;
  model.rates.adam_parameters_per_second = kBlockElements / 0.004;
  const double fetched = static_cast<double>(predict(model).nvme_read_bytes) / kParameterBytes - 48;
  EXPECT_NEAR(model.step_s(OverlapPolicy::kSerial), fetched * 0.001 + 8 * (0.006 + 0.004 + 0.006),
              kTiny);
  model.placement.lanes.count = 8;
  model.set_prefetch_slots(8);  // reads one after the other; then Adam and the writes behind
  EXPECT_NEAR(model.step_s(OverlapPolicy::kSerial), fetched * 0.001 + 8 * 0.006 + 0.004 + 0.006,
              kTiny);
}

// 1 ms per parameter block: each block goes down for its update and up again after it.
TEST(Bound, ParametersOnTheDeviceTravelForTheirUpdate) {
  Model model(std::vector<int>(4, 1));
  model.set_tiers(Tier::kDevice, Tier::kHost);
  model.window =
      plan_window(model.schedule, window_unit_bytes(model.layout, model.placement), 0, 1);
  model.rates.up_bytes_per_second = kParameterBytes / 0.001;
  model.rates.down_bytes_per_second = kParameterBytes / 0.001;
  const StepCost cost = bound_step(model.shape(), OverlapPolicy::kSerial);
  EXPECT_NEAR(cost.busy(Resource::kCopyUp), 0.004, kTiny);
  EXPECT_NEAR(cost.busy(Resource::kCopyDown), 0.008, kTiny);  // gradients, then parameters
  EXPECT_NEAR(cost.step_s, 0.008 + 0.001, kTiny);
  // Forward follows the updates of 4 ms, and the gradients of 4 ms follow forward; meanwhile three
  // lanes are filled again.
  EXPECT_NEAR(model.step_s(OverlapPolicy::kDeferred), 0.008, kTiny);
}

// Host memory takes 1 ms for the bf16 parameters of one block, of which the record is five times as
// much. Nothing else takes long, and all of it shares the memory.
TEST(Bound, HostMemoryServesUpdatesCopiesAndStorageTogether) {
  Model model(std::vector<int>(8, 1));
  model.rates.host_memory_bytes_per_second = kParameterBytes / 0.001;
  model.set_compute(1e-6, 1e-6);
  model.set_tiers(Tier::kDevice, Tier::kHost);
  model.window =
      plan_window(model.schedule, window_unit_bytes(model.layout, model.placement), 0, 1);
  for (const OverlapPolicy policy : kPolicies) {
    // The gradient comes down, the update reads it and reads and writes the state, and the
    // parameters come down for it and go up behind it.
    const StepCost cost = bound_step(model.shape(), policy);
    EXPECT_NEAR(cost.busy(Resource::kHostMemory), 8 * 0.001 * (1 + 1 + 12 + 2), kTiny);
    EXPECT_EQ(cost.scarcest(), Resource::kHostMemory);
    EXPECT_DOUBLE_EQ(cost.step_s, cost.busy(Resource::kHostMemory));
  }
  EXPECT_NEAR(minimum_step(model.shape()).step_s, 0.128, kTiny);
  // A second micro-batch's gradients come down as well, and are added to the first one's.
  model.schedule = training_schedule(model.spec, 2);
  model.window =
      plan_window(model.schedule, window_unit_bytes(model.layout, model.placement), 0, 1);
  EXPECT_NEAR(minimum_step(model.shape()).step_s, 0.128 + 8 * 0.001 * (1 + 2), kTiny);
  // The GPU's updates draw on host memory by their copies alone.
  model.placement.streams_updates = true;
  model.placement.update_staging.count = 4;
  const StepCost streamed = bound_step(model.shape(), OverlapPolicy::kSerial);
  EXPECT_NEAR(streamed.busy(Resource::kHostMemory), 8 * 0.001 * (2 + 2 + 6 + 5), kTiny)
      << "gradients of two micro-batches, their addition, and the way up and down";
}

// As cpu_optim counts for the arrays of an update.
TEST(Bound, AnUpdateMovesTheBytesOfItsArrays) {
  StateFormat format;
  EXPECT_EQ(update_bytes_per_element(format), 14 + 12) << "bf16, its low half, fp32 moments";
  format.moments = OptimizerState::kBf16;
  EXPECT_EQ(update_bytes_per_element(format), 10 + 8);
  format.keeps_exp_avg = false;
  EXPECT_EQ(update_bytes_per_element(format), 8 + 6);
  EXPECT_EQ(
      update_bytes_per_element(
          {.parameter = DType::kFp32, .gradient = DType::kFp32, .master = MasterLayout::kFp32}),
      16 + 12);
  EXPECT_EQ(
      update_bytes_per_element(
          {.parameter = DType::kFp16, .gradient = DType::kFp16, .master = MasterLayout::kFp16}),
      14 + 14)
      << "fp16 parameters are written alone";
}

TEST(Bound, WhatStorageMovesGoesThroughHostMemory) {
  Model model(std::vector<int>(8, 1));
  const double rate = kParameterBytes / 0.0001;
  model.rates.read_bytes_per_second = model.rates.write_bytes_per_second = rate;
  model.rates.up_bytes_per_second = model.rates.down_bytes_per_second = rate;
  model.rates.duplex = Duplex::kHalf;
  model.rates.host_memory_bytes_per_second = kParameterBytes / 0.001;
  for (const OverlapPolicy policy : kPolicies) {
    const StepCost cost = bound_step(model.shape(), policy);
    const double moved_s = cost.busy(Resource::kStorage) + cost.busy(Resource::kCopyUp) +
                           cost.busy(Resource::kCopyDown);
    EXPECT_NEAR(cost.busy(Resource::kHostMemory), 10 * moved_s + 8 * 0.001 * (1 + 12), kTiny);
    EXPECT_DOUBLE_EQ(cost.step_s, cost.busy(Resource::kHostMemory));
  }
}

// 1 ms per parameter block on the link. A block whose parameters stay on the device takes 6 up and
// 5 down; one from host memory takes 7 and 6. Both directions run side by side.
TEST(Bound, UpdatesOnTheDeviceCostTheLink) {
  Model model(std::vector<int>(8, 1));
  model.placement.streams_updates = true;
  model.placement.update_staging.count = 4;
  model.rates.up_bytes_per_second = kParameterBytes / 0.001;
  model.rates.down_bytes_per_second = kParameterBytes / 0.001;
  model.rates.adam_parameters_per_second = 1;  // the CPU would take hours
  model.rates.device_adam_parameters_per_second = kBlockElements / 0.0001;
  model.set_tiers(Tier::kDevice, Tier::kHost);
  model.window =
      plan_window(model.schedule, window_unit_bytes(model.layout, model.placement), 0, 1);
  const StepCost cost = bound_step(model.shape(), OverlapPolicy::kSerial);
  EXPECT_NEAR(cost.busy(Resource::kCopyUp), 8 * 0.006, kTiny);
  EXPECT_NEAR(cost.busy(Resource::kCopyDown), 8 * (0.005 + 0.001), kTiny);  // and the gradients
  EXPECT_NEAR(cost.busy(Resource::kDeviceUpdate), 8 * 0.0001, kTiny);
  EXPECT_NEAR(cost.busy(Resource::kCpu), 0, kTiny);
  EXPECT_NEAR(cost.step_s, 8 * 0.001 + 8 * 0.006 + 0.0001 + 0.005, kTiny);
  model.placement.gradient_tier.assign(8, Tier::kDevice);
  EXPECT_NEAR(bound_step(model.shape(), OverlapPolicy::kSerial).busy(Resource::kCopyUp), 8 * 0.005,
              kTiny);
}

// One of two ranks moves what one rank does of units half as large.
TEST(Bound, RanksMoveTheirShards) {
  Model half({2, 4}, 2);
  half.rates.down_bytes_per_second = half.rates.up_bytes_per_second = 1e9;
  half.rates.norm_parameters_per_second = 1e6;
  const Layout shared(validated(Model::spec_of({4, 8})), {}, kBlockElements, {}, {.count = 2});
  const StepCost own = bound_step(half.shape(), OverlapPolicy::kDeferred);
  const StepCost rank = bound_step({shared, half.placement, half.schedule, half.window, half.rates},
                                   OverlapPolicy::kDeferred);
  EXPECT_EQ(rank.busy_s, own.busy_s);
  EXPECT_EQ(rank.step_s, own.step_s);
}

// A unit that is gathered from shards on the device goes up for no use; for its update, once per
// step.
TEST(Bound, ShardsAtHomeOnTheDeviceAreFetchedWithoutACopy) {
  Model half({1, 1, 1, 1}, 2);
  const Layout shared(validated(Model::spec_of({2, 2, 2, 2})), {}, kBlockElements, {},
                      {.count = 2});
  half.set_tiers(Tier::kDevice, Tier::kHost);
  half.window =
      plan_window(half.schedule, window_unit_bytes(shared, half.placement), 4 * kParameterBytes, 1);
  half.rates.up_bytes_per_second = kParameterBytes / 0.001;
  half.set_compute(0.010, 0.020);
  std::uint64_t fetches = 0;
  for (const WindowUse& use : half.window.uses) fetches += use.fetch ? 1 : 0;
  EXPECT_GT(fetches, 4u);
  const StepShape shape{shared, half.placement, half.schedule, half.window, half.rates};
  const StepCost on_device = bound_step(shape, OverlapPolicy::kSerial);
  EXPECT_NEAR(on_device.busy(Resource::kCopyUp), 0.004, kTiny);
  half.set_tiers(Tier::kHost, Tier::kHost);
  const StepCost on_host = bound_step(shape, OverlapPolicy::kSerial);
  EXPECT_NEAR(on_host.busy(Resource::kCopyUp), 0.001 * static_cast<double>(fetches), kTiny);
}

// The first gradients are copied. The last addition also takes the norm.
TEST(Bound, MicroBatchesAreAddedBeforeTheNorm) {
  Model model(std::vector<int>(4, 1));
  model.set_compute(0.010, 0.010);
  model.rates.norm_parameters_per_second = kBlockElements / 0.001;
  EXPECT_NEAR(bound_step(model.shape(), OverlapPolicy::kSerial).busy(Resource::kCpu), 0.004, kTiny);
  model.schedule = training_schedule(model.spec, 3);
  model.window = plan_window(model.schedule, window_unit_bytes(model.layout, model.placement),
                             model.placement.window_bytes, 1);
  const StepCost cost = bound_step(model.shape(), OverlapPolicy::kSerial);
  EXPECT_NEAR(cost.busy(Resource::kCpu), 2 * 0.004, kTiny);
  EXPECT_NEAR(cost.step_s, 3 * 8 * 0.010 + 0.001, kTiny);
}

// One of 1,024 ranks of a model of 10^12 parameters, and the whole of it: sizes that a quadratic
// step would not come back from. How long it takes is tests/bench/plan_scale.py's business.
TEST(Bound, PlansATrillionParameters) {
  for (const std::uint64_t ranks : {1024, 1}) {
    constexpr std::uint64_t kUnits = 1000;
    constexpr std::uint64_t kUnitElements = 1'000'000'000;
    ModelSpec spec;
    for (std::uint64_t i = 0; i < kUnits; ++i)
      spec.units.push_back(
          {.name = fmt::format("u{}", i),
           .tensors = {{.name = fmt::format("t{}", i), .shape = {kUnitElements / ranks}}}});
    spec = validated(spec);
    const Layout layout(spec, {}, {});
    const std::uint64_t parameter_bytes = 2 * kUnits * kUnitElements / ranks;
    const Placement placement = plan_placement(
        layout, spec, {}, {.device_bytes = parameter_bytes / 2, .host_bytes = 3 * parameter_bytes},
        {.overlaps = true, .lanes = {}});
    EXPECT_LE(placement.device_bytes(), parameter_bytes / 2);
    EXPECT_LE(placement.host_bytes(), 3 * parameter_bytes);
    EXPECT_GE(placement.nvme_bytes() + placement.host_bytes() + placement.device_bytes(),
              layout.state_bytes());
    if (ranks == 1) continue;
    const Schedule schedule = training_schedule(spec, 1);
    const WindowPlan window =
        plan_window(schedule, window_unit_bytes(layout, placement), placement.window_bytes, 1);
    Rates rates;
    rates.read_bytes_per_second = rates.write_bytes_per_second = 5e9;
    rates.units.assign(kUnits, {.forward_s = 1e-3, .backward_s = 2e-3});
    const StepCost cost =
        bound_step({layout, placement, schedule, window, rates}, OverlapPolicy::kDeferred);
    EXPECT_GE(cost.step_s, 3.0);
    EXPECT_EQ(cost.traffic.nvme_write_bytes, placement.nvme_bytes());
  }
}

// Beside a step that takes next to nothing, activations on storage take what their bytes take.
TEST(Activations, AreBusyTimeThatNoStepEndsBefore) {
  for (const Duplex duplex : {Duplex::kHalf, Duplex::kFull}) {
    Model model({1, 1});
    model.set_compute(1e-6, 1e-6);
    model.set_tiers(Tier::kHost, Tier::kHost);
    model.rates.duplex = duplex;
    model.rates.read_bytes_per_second = 2e9;
    model.rates.write_bytes_per_second = 1e9;
    model.rates.up_bytes_per_second = 8e9;
    model.rates.down_bytes_per_second = 4e9;
    model.rates.host_memory_bytes_per_second = 40e9;
    const StepCost without = bound_step(model.shape(), OverlapPolicy::kDeferred);
    ActivationPlan plan;
    plan.stored_bytes = 1'000'000'000;
    plan.fetched_bytes = 3'000'000'000;
    StepShape shape = model.shape();
    shape.activations = &plan;
    const auto added = [&](Resource resource) {
      return bound_step(shape, OverlapPolicy::kDeferred).busy(resource) - without.busy(resource);
    };
    EXPECT_NEAR(added(Resource::kCopyUp), 0.375, 1e-9);
    EXPECT_NEAR(added(Resource::kCopyDown), 0.25, 1e-9);
    EXPECT_EQ(added(Resource::kStorage), 0) << "at home in host memory";
    EXPECT_NEAR(added(Resource::kHostMemory), 0.1, 1e-9);
    EXPECT_NEAR(bound_step(shape, OverlapPolicy::kDeferred).step_s, 0.375, 1e-3);
    model.placement.nvme_activation_bytes = 1;
    const StepCost cost = bound_step(shape, OverlapPolicy::kDeferred);
    EXPECT_NEAR(added(Resource::kHostMemory), 0.2, 1e-9);
    if (duplex == Duplex::kHalf) {
      EXPECT_NEAR(added(Resource::kStorage), 2.5, 1e-9);
      EXPECT_NEAR(cost.step_s, 2.5, 1e-3);
    } else {
      EXPECT_NEAR(added(Resource::kStorageRead), 1.5, 1e-9);
      EXPECT_NEAR(added(Resource::kStorageWrite), 1.0, 1e-9);
      EXPECT_NEAR(cost.step_s, 1.5, 1e-3);
    }
    EXPECT_EQ(cost.traffic.nvme_read_bytes, without.traffic.nvme_read_bytes + plan.fetched_bytes);
    EXPECT_EQ(cost.traffic.nvme_write_bytes, without.traffic.nvme_write_bytes + plan.stored_bytes);
    EXPECT_NEAR(minimum_step(shape).step_s, cost.step_s, 1e-3);
  }
}

}  // namespace
}  // namespace sluice
