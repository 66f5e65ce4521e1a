// Steps that use a part of the units, under optimizer.untouched "lazy": the bits are those of
// "update", wherever the state is and goes, and the bytes are those of the units in use.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <sluice/units.h>
#include "engine/bound/bound.h"
#include "engine/bound/planned_step.h"
#include "engine/checkpoint/checkpoint_source.h"
#include "engine/engine_access.h"
#include "tests/engine/checkpoint/save_beside.h"
#include "tests/engine/step/announce_cases.h"
#include "tests/support/memory_source.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_computation.h"

namespace sluice::test {
namespace {

constexpr std::uint32_t kLazyActive = 1;

class LazyTest : public testing::Test {
 protected:
  LazyTest() {
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config_.memory.device_bytes = 400_KiB;
    config_.optimizer.untouched = UntouchedPolicy::kLazy;
  }

  // The oracle updates every unit in every step.
  static void expect_update(const Config& config, const ToyOptions& options,
                            const std::string& what) {
    const ToyResult oracle = toy_oracle(config, options);
    const ToyResult result = run_toy(config, options);
    EXPECT_TRUE(same_training(result, oracle)) << what;
    for (std::size_t i = 0; i < result.reports.size(); ++i)
      EXPECT_EQ(result.reports[i].gradient_norm, oracle.reports[i].gradient_norm) << what;
  }
  static ToyOptions routed_steps(std::uint64_t seed, std::uint32_t steps) {
    ToyOptions options = routed_options(seed, kLazyActive);
    options.steps = steps;
    options.size = ToySize::kSmall;
    return options;
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
};

TEST_F(LazyTest, UnderEveryPolicyTheBitsAreThoseOfUpdate) {
  for (const PolicyCase& policy : kPolicies) {
    for (const std::uint32_t lanes : {0u, 1u, 2u}) {
      const std::uint32_t micro_batches = lanes == 0 ? 1 : 3;
      ToyOptions options = routed_steps(micro_batches, 8);
      options.micro_batches = micro_batches;
      options.evaluate = true;
      config_.optimizer.overlap = policy.policy;
      config_.optimizer.clip_norm = clip_norm_of(policy, micro_batches);
      if (lanes != 0) config_.optimizer.lanes = lanes;
      expect_update(config_, options, fmt::format("{}, lanes {}", policy.name, lanes));
    }
    config_.optimizer.lanes.reset();
  }
}

TEST_F(LazyTest, WhereverTheStateIs) {
  using enum TierChoice;
  config_.memory.device_bytes = 16_MiB;
  for (const TierChoice optimizer : {kNvme, kHost, kDevice}) {
    for (const TierChoice parameters : {kNvme, kHost, kDevice}) {
      for (const TierChoice gradients : {kHost, kNvme, kDevice}) {
        if (optimizer == kDevice && (parameters != kDevice || gradients != kDevice)) continue;
        config_.placement = {
            .parameters = parameters, .optimizer = optimizer, .gradients = gradients};
        expect_update(config_, routed_steps(3, 6),
                      fmt::format("parameters {}, optimizer {}, gradients {}", name_of(parameters),
                                  name_of(optimizer), name_of(gradients)));
      }
    }
  }
}

TEST_F(LazyTest, WithEveryKindOfState) {
  for (const OptimizerState state :
       {OptimizerState::kFp32, OptimizerState::kBf16, OptimizerState::k8bit}) {
    for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kAdam}) {
      config_.optimizer.state = state;
      config_.optimizer.kind = kind;
      expect_update(config_, routed_steps(5, 6),
                    fmt::format("{} {}", name_of(state), name_of(kind)));
    }
  }
}

// Units of the schedule that some steps leave out.
TEST_F(LazyTest, UnitsThatLeaveTheSchedule) {
  for (const PolicyCase& policy : kPolicies) {
    config_.optimizer.overlap = policy.policy;
    config_.optimizer.clip_norm = clip_norm_of(policy, 1);
    ToyOptions options;
    options.size = ToySize::kSmall;
    options.steps = 8;
    options.change = [](std::uint64_t step, ToyUses& uses) {
      std::erase_if(uses, [step](const ToyUse& use) { return index_of(use.unit) == step / 2 % 4; });
    };
    expect_update(config_, options, policy.name);
  }
}

TEST_F(LazyTest, HoweverManyUpdatesAUnitMayMiss) {
  for (const std::uint32_t most : {1u, 2u, 5u}) {
    config_.optimizer.lazy_max = most;
    for (const OverlapPolicy overlap : {OverlapPolicy::kSerial, OverlapPolicy::kDeferred}) {
      config_.optimizer.overlap = overlap;
      expect_update(config_, routed_steps(most, 12), fmt::format("{}", most));
    }
  }
}

// The bytes of a step: the schedule's as predicted, those of the experts that it uses, and those of
// experts that come late. A unit that may miss no more makes up for all without being used.
TEST_F(LazyTest, OnlyTheBytesOfWhatAStepUsesMove) {
  config_.optimizer.overlap = OverlapPolicy::kSerial;
  const ToyOptions options = routed_steps(5, 60);
  std::uint64_t least_late_bytes = 0;
  for (const std::uint32_t most : {1000u, 4u}) {
    config_.optimizer.lazy_max = most;
    const ToyResult result = run_toy(config_, options);
    std::uint64_t late_bytes = 0, used_bytes = 0;
    for (const StepReport& report : result.reports) {
      EXPECT_EQ(report.untouched_units, kExperts - kLayers * kLazyActive);
      EXPECT_EQ(report.nvme_write_bytes, result.predicted.nvme_write_bytes +
                                             report.announced_update_bytes +
                                             report.late_update_bytes);
      // A use finds the parameters that a late update has just made, and does not read them.
      const std::uint64_t read_bytes = result.predicted.nvme_read_bytes +
                                       report.announced_read_bytes + report.announced_update_bytes +
                                       report.late_update_bytes;
      EXPECT_LE(report.nvme_read_bytes, read_bytes);
      EXPECT_GE(report.nvme_read_bytes, read_bytes - report.announced_read_bytes);
      late_bytes += report.late_update_bytes;
      used_bytes += report.announced_update_bytes;
    }
    EXPECT_GT(late_bytes, least_late_bytes) << "fewer updates at once, more often";
    if (most == 1000) {
      EXPECT_LE(late_bytes, used_bytes) << "each use makes up for everything at once";
    }
    least_late_bytes = late_bytes;
    EXPECT_TRUE(same_training(result, toy_oracle(config_, options))) << most;
  }
}

// The experts take turns, so each has missed as many updates as its layer has other experts.
TEST_F(LazyTest, ThePlanCountsTheBytesOfLateUnits) {
  config_.optimizer.overlap = OverlapPolicy::kSerial;
  const auto announced_at = [](std::uint64_t step, const ToyUses& uses) {
    std::vector<PlannedAnnouncement> announcements;
    for (std::uint32_t i = 0; i < uses.size(); ++i) {
      const std::uint32_t layer = index_of(uses[i].unit) - 1;
      if (layer >= kLayers) continue;
      const auto of_layer = static_cast<std::uint32_t>(step % kExpertsOfLayer);
      announcements.push_back({.before_use = uses[i].pass == Pass::kForward ? i + 1 : i,
                               .announced_before = uses[i].pass == Pass::kForward ? i + 1 : i,
                               .pass = uses[i].pass,
                               .units = {UnitId{kFirstExpert + layer * kExpertsOfLayer + of_layer}},
                               .missed_updates = static_cast<std::uint32_t>(
                                   std::min<std::uint64_t>(step - 1, kExpertsOfLayer - 1))});
    }
    return announcements;
  };
  ToyOptions options = routed_steps(5, 14);
  options.change = [&](std::uint64_t step, ToyUses& uses) {
    ToyUses all;
    const auto announcements = announced_at(step, uses);
    for (std::uint32_t i = 0; i <= uses.size(); ++i) {
      for (const PlannedAnnouncement& of : announcements)
        if (of.before_use == i) all.push_back({of.units[0], of.pass, 1000 + i});
      if (i < uses.size()) all.push_back(uses[i]);
    }
    uses = all;
  };
  const ModelSpec model = validated(toy_model_of(options));
  const auto device = make_host_device({.memory_bytes = 400_KiB});
  Engine engine(config_, model, *device);
  const ToyResult result = run_toy(engine, model, *device, config_, options);
  EXPECT_TRUE(same_training(result, toy_oracle(config_, options)));
  const ToyUses uses = planned_uses(model, 1, MicroBatchOrder::kHorizontal);
  Rates rates;
  rates.read_bytes_per_second = rates.write_bytes_per_second = 1e9;
  rates.units.assign(model.units.size(), {.forward_s = 1e-5, .backward_s = 1e-5});
  for (const StepReport& report : result.reports) {
    SCOPED_TRACE(report.step);
    const PlannedStep planned({.model = model}, layout_of(engine), placement_of(engine), 1,
                              announced_at(report.step, uses));
    const Traffic least = bound_step(planned.shape(rates), OverlapPolicy::kSerial).traffic;
    EXPECT_EQ(report.nvme_write_bytes, least.nvme_write_bytes);
    EXPECT_GE(report.nvme_read_bytes, least.nvme_read_bytes);
    EXPECT_LE(report.nvme_read_bytes, least.nvme_read_bytes + report.announced_read_bytes);
    EXPECT_EQ(report.late_update_bytes == 0, report.step == 1);
  }
}

// State that is read between steps is up to date, and a run goes on from there, also elsewhere.
TEST_F(LazyTest, WhatIsReadIsUpToDate) {
  ToyOptions options = routed_steps(9, 6);
  const ModelSpec model = toy_model_of(options);
  options.after_step = [this](Engine& engine, std::uint64_t step) {
    if (step % 2 != 0) return;
    const ToyOptions so_far = routed_steps(9, static_cast<std::uint32_t>(step));
    EXPECT_TRUE(read_state(engine) == toy_oracle(config_, so_far).state) << step;
    EXPECT_TRUE(engine.position().tensor_updates.empty());
  };
  const auto device = make_host_device({.memory_bytes = 16_MiB});
  Engine engine(config_, model, *device);
  (void)run_toy(engine, model, *device, config_, options);
  MemorySource source(engine);
  ToyOptions rest = routed_steps(9, 3);
  rest.source = &source;
  EXPECT_TRUE(run_toy(config_, rest).state == toy_oracle(config_, routed_steps(9, 9)).state);
}

TEST_F(LazyTest, CheckpointsBesideTraining) {
  config_.memory.save_buffers = 2;
  config_.memory.device_bytes = 4_MiB;
  ToyOptions options = routed_steps(4, 5);
  const TempDirectory root;
  const SavedCheckpoint saved = expect_exact(config_, options, root.path());
  CheckpointSource source(saved.path);
  options.steps = 3;
  options.source = &source;
  const ToyResult second = run_toy(config_, options);
  options.steps = 5;
  options.source = nullptr;
  EXPECT_TRUE(second.state == toy_oracle(config_, options).state);
}

// A commit holds every unit up to date. Between runs, "lazy" and "update" may change.
TEST_F(LazyTest, DurableStoresGoOn) {
  constexpr OverlapPolicy kAll[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                    OverlapPolicy::kEager, OverlapPolicy::kSpeculative};
  for (std::size_t i = 0; i < std::size(kAll); ++i) {
    for (const std::uint32_t commit_every : {i % 2 == 0 ? 1u : 4u, 2u}) {
      const TempDirectory directory;
      Config config = toy_config(directory.path());
      config.placement = config_.placement;
      config.optimizer.untouched = UntouchedPolicy::kLazy;
      config.optimizer.clip_norm = 0;
      config.optimizer.overlap = kAll[i];
      config.storage.state = {.name = "run-7", .commit_every = commit_every};
      config.memory.device_bytes = 16_MiB;
      config.storage.block_elements = 4096;
      ToyOptions options = routed_steps(i, 17);
      const ModelSpec model = toy_model_of(options);
      const ToyResult expected = toy_oracle(config, options);
      ToyResult last;
      for (const std::uint32_t steps : {5u, 6u, 6u}) {
        options.steps = steps;
        const auto device = make_host_device({.memory_bytes = 16_MiB});
        Engine engine(config, model, *device);
        last = run_toy(engine, model, *device, config, options);
        engine.close();
        config.optimizer.untouched = steps == 5 ? UntouchedPolicy::kUpdate : UntouchedPolicy::kLazy;
      }
      EXPECT_EQ(last.reports.back().step, 17u);
      EXPECT_TRUE(last.state == expected.state)
          << name_of(kAll[i]) << ", commits every " << commit_every;
    }
  }
}

}  // namespace
}  // namespace sluice::test
