// Steps that use a part of the units, under optimizer.untouched "skip": the other units stay as
// they are, no byte of them moves, and each unit counts its own updates, wherever its state is and
// goes.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/checkpoint/checkpoint_source.h"
#include "engine/checkpoint/store_source.h"
#include "engine/engine_access.h"
#include "tests/engine/checkpoint/save_beside.h"
#include "tests/engine/step/announce_cases.h"
#include "tests/support/expect_error.h"
#include "tests/support/memory_source.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

constexpr std::uint32_t kUntouchedActive = 2;

// The toy's own units are used in every step, and experts as the router says.
std::set<std::uint32_t> touched_in(std::uint64_t seed, std::uint64_t step) {
  ToyUses uses;
  for (std::uint32_t unit = 0; unit < kFirstExpert; ++unit)
    uses.push_back({UnitId{unit}, Pass::kForward});
  route(seed, step, uses, kUntouchedActive);
  std::set<std::uint32_t> units;
  for (const ToyUse& use : uses) units.insert(index_of(use.unit));
  return units;
}

class UntouchedTest : public testing::Test {
 protected:
  UntouchedTest() {
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config_.memory.device_bytes = 400_KiB;
    config_.optimizer.untouched = UntouchedPolicy::kSkip;
  }

  void expect_the_oracle(const Config& config, const ToyOptions& options, const std::string& what) {
    const ToyResult oracle = toy_oracle(config, options);
    const ToyResult result = run_toy(config, options);
    EXPECT_TRUE(same_training(result, oracle)) << what;
    for (std::size_t i = 0; i < result.reports.size(); ++i) {
      EXPECT_EQ(result.reports[i].gradient_norm, oracle.reports[i].gradient_norm) << what;
      EXPECT_EQ(result.reports[i].untouched_units, oracle.reports[i].untouched_units) << what;
    }
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
};

TEST_F(UntouchedTest, UnderEveryPolicyTheBitsAreTheOracles) {
  for (const PolicyCase& policy : kPolicies) {
    for (const std::uint32_t micro_batches : {1u, 3u}) {
      ToyOptions options = routed_options(micro_batches);
      options.micro_batches = micro_batches;
      options.evaluate = true;
      config_.optimizer.overlap = policy.policy;
      config_.optimizer.clip_norm = clip_norm_of(policy, micro_batches);
      expect_the_oracle(config_, options, fmt::format("{}, {}", policy.name, micro_batches));
    }
  }
}

TEST_F(UntouchedTest, WhereverTheStateIs) {
  using enum TierChoice;
  for (const TierChoice optimizer : {kNvme, kHost, kDevice}) {
    for (const TierChoice parameters : {kNvme, kHost, kDevice}) {
      for (const TierChoice gradients : {kHost, kNvme, kDevice}) {
        if (optimizer == kDevice && (parameters != kDevice || gradients != kDevice)) continue;
        config_.placement = {
            .parameters = parameters, .optimizer = optimizer, .gradients = gradients};
        config_.memory.device_bytes = 16_MiB;
        for (const UnifiedMemory unified : {UnifiedMemory::kAuto, UnifiedMemory::kOff}) {
          config_.memory.unified = unified;
          expect_the_oracle(config_, routed_options(3),
                            fmt::format("parameters {}, optimizer {}, gradients {}, unified {}",
                                        name_of(parameters), name_of(optimizer), name_of(gradients),
                                        name_of(unified)));
        }
      }
    }
  }
}

// Units of the schedule that some steps leave out, under every placement, and two policies in each.
TEST_F(UntouchedTest, UnitsThatLeaveTheScheduleStay) {
  for (std::size_t i = 0; i < std::size(kCases); ++i) {
    const Case& placement = kCases[i];
    for (const std::size_t number : {i, i + 3}) {
      const PolicyCase& policy = kPolicies[number % std::size(kPolicies)];
      const TempDirectory directory;
      Config config = toy_config(directory.path());
      placement.change(config);
      config.optimizer.untouched = UntouchedPolicy::kSkip;
      config.optimizer.overlap = policy.policy;
      config.optimizer.clip_norm = clip_norm_of(policy, 1);
      ToyOptions options;
      options.size = ToySize::kSmall;
      options.change = [](std::uint64_t step, ToyUses& uses) {
        std::erase_if(uses, [step](const ToyUse& use) { return index_of(use.unit) == step % 4; });
      };
      expect_the_oracle(config, options, placement.name + ", " + policy.name);
    }
  }
}

// Under "update", a unit without gradient is updated as ever.
TEST_F(UntouchedTest, WithUpdateNothingStays) {
  config_.optimizer.untouched = UntouchedPolicy::kUpdate;
  const ToyOptions options = routed_options(3, kUntouchedActive);
  const ToyResult result = run_toy(config_, options);
  EXPECT_TRUE(same_training(result, toy_oracle(config_, options)));
  EXPECT_EQ(result.reports[0].untouched_units, 0u);
  EXPECT_EQ(result.reports[0].announced_update_bytes, 0u);
}

// The bytes of a step: the schedule's as predicted, and those of the experts that it has used.
TEST_F(UntouchedTest, OnlyTheBytesOfWhatAStepUsesMove) {
  config_.optimizer.overlap = OverlapPolicy::kSerial;
  ToyOptions options = routed_options(5, kUntouchedActive);
  options.steps = 100;
  options.size = ToySize::kSmall;
  const auto device = make_host_device({.memory_bytes = *config_.memory.device_bytes});
  const ModelSpec model = toy_model_of(options);
  Engine engine(config_, model, *device);
  const ToyResult result = run_toy(engine, model, *device, config_, options);
  std::uint64_t scheduled_bytes = 0;  // of the update of the toy's own units
  const auto update_bytes = [&](std::uint32_t unit) {
    std::uint64_t bytes = 0;
    for (const BlockPlace& block : layout_of(engine).blocks_of(UnitId{unit}))  // bf16, split master
      bytes += align_up(block.element_count * 2, 4096) + align_up(block.element_count * 10, 4096);
    return bytes;
  };
  for (std::uint32_t unit = 0; unit < kFirstExpert; ++unit) scheduled_bytes += update_bytes(unit);
  EXPECT_EQ(result.predicted.nvme_write_bytes, scheduled_bytes);
  for (std::uint64_t step = 1; step <= options.steps; ++step) {
    const std::set<std::uint32_t> touched = touched_in(5, step);
    std::uint64_t bytes = 0;
    for (const std::uint32_t unit : touched) bytes += unit < kFirstExpert ? 0 : update_bytes(unit);
    const StepReport& report = result.reports[step - 1];
    EXPECT_EQ(report.schedule_changes, 0u);
    EXPECT_EQ(report.untouched_units, model.units.size() - touched.size());
    EXPECT_EQ(report.announced_update_bytes, bytes);
    EXPECT_EQ(report.nvme_write_bytes, scheduled_bytes + bytes);
    EXPECT_EQ(report.nvme_read_bytes,
              result.predicted.nvme_read_bytes + report.announced_read_bytes + bytes);
  }
  EXPECT_TRUE(same_training(result, toy_oracle(config_, options)));
}

// AdamW as torch defines it, in double precision: a parameter without gradient is left alone, and
// its bias correction counts its own updates.
TEST_F(UntouchedTest, EachUnitIsWhatTorchsAdamWMakesOfIt) {
  constexpr std::uint64_t kElements = 300;
  config_.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config_.optimizer.clip_norm = 0;
  ModelSpec model;
  for (const char* name : {"always", "often", "seldom"})
    model.units.push_back({.name = name, .tensors = {{.name = name, .shape = {kElements}}}});
  model.units[1].is_announced = model.units[2].is_announced = true;
  const auto device = make_host_device({.memory_bytes = 4_MiB});
  Engine engine(config_, model, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  const auto read = [&](std::uint32_t tensor) {
    std::vector<float> values(kElements);
    engine.read_state(TensorId{tensor}, StateKind::kMaster, 0,
                      std::as_writable_bytes(std::span(values)));
    return values;
  };
  struct Reference {
    std::vector<double> weight, exp_avg, exp_avg_sq;
    int updates = 0;
  };
  std::vector<Reference> references(3);
  for (std::uint32_t tensor = 0; tensor < 3; ++tensor) {
    const std::vector<float> values = read(tensor);
    references[tensor].weight.assign(values.begin(), values.end());
    references[tensor].exp_avg.resize(kElements);
    references[tensor].exp_avg_sq.resize(kElements);
  }
  const AdamOptions& adam = config_.optimizer.adam;
  constexpr double kRate = 1e-2;
  for (std::uint32_t step = 1; step <= 12; ++step) {
    Step now = engine.begin_step({.learning_rate = kRate});
    for (std::uint32_t unit = 0; unit < 3; ++unit) {
      if (step % (unit + 1) != 0) continue;  // each, every second, every third
      if (unit > 0) now.announce(std::vector{UnitId{unit}}, Pass::kBackward);
      if (unit == 0) (void)now.acquire(UnitId{0}, Pass::kForward, stream);
      const Lease lease = now.acquire(UnitId{unit}, Pass::kBackward, stream);
      auto* gradient = lease.gradient<float>(0);
      const auto value = [step, unit](std::uint64_t i) {
        return std::sin(0.1 * static_cast<double>(i + 7 * step + 13 * unit));
      };
      device->launch(stream.id(), [gradient, value] {
        for (std::uint64_t i = 0; i < kElements; ++i) gradient[i] = static_cast<float>(value(i));
      });
      Reference& torch = references[unit];
      ++torch.updates;
      for (std::uint64_t i = 0; i < kElements; ++i) {
        const double g = static_cast<float>(value(i));
        torch.weight[i] *= 1 - kRate * adam.weight_decay;
        torch.exp_avg[i] += (g - torch.exp_avg[i]) * (1 - adam.beta1);
        torch.exp_avg_sq[i] = adam.beta2 * torch.exp_avg_sq[i] + (1 - adam.beta2) * g * g;
        const double root =
            std::sqrt(torch.exp_avg_sq[i] / (1 - std::pow(adam.beta2, torch.updates)));
        torch.weight[i] -= kRate / (1 - std::pow(adam.beta1, torch.updates)) * torch.exp_avg[i] /
                           (root + adam.epsilon);
      }
    }
    EXPECT_EQ(now.finish().untouched_units, (step % 2 != 0) + (step % 3 != 0));
  }
  EXPECT_EQ(engine.position().tensor_updates,
            (std::map<std::string, std::uint64_t>{{"often", 6}, {"seldom", 4}}));
  for (std::uint32_t tensor = 0; tensor < 3; ++tensor) {
    const std::vector<float> values = read(tensor);
    for (std::uint64_t i = 0; i < kElements; ++i)
      ASSERT_NEAR(values[i], references[tensor].weight[i], 2e-6) << tensor << ", " << i;
  }
}

// Returns what a position says after `steps` steps of the routed toy.
std::map<std::string, std::uint64_t> updates_after(std::uint64_t seed, std::uint64_t steps,
                                                   const Engine& engine) {
  std::map<std::string, std::uint64_t> updates;
  for (const TensorPlace& tensor : engine.tensors()) {
    std::uint64_t count = 0;
    for (std::uint64_t step = 1; step <= steps; ++step)
      count += touched_in(seed, step).count(index_of(tensor.unit));
    if (count != steps) updates[tensor.name] = count;
  }
  return updates;
}

// The run goes on from another engine's state, with the counts of updates that belong to it.
TEST_F(UntouchedTest, GoesOnFromAnotherEnginesState) {
  using enum TierChoice;
  ToyOptions options = routed_options(9, kUntouchedActive);
  options.steps = 6;
  const ToyResult expected = toy_oracle(config_, options);
  const ModelSpec model = toy_model_of(options);
  for (const TierChoice home : {kHost, kDevice, kNvme}) {
    Config after = config_;
    after.placement = {home, home == kDevice ? kDevice : kHost, home == kDevice ? kDevice : kAuto};
    after.memory.device_bytes = 16_MiB;
    options.steps = 3;
    options.source = nullptr;
    const auto device = make_host_device({.memory_bytes = 16_MiB});
    Engine engine(config_, model, *device);
    (void)run_toy(engine, model, *device, config_, options);
    EXPECT_EQ(engine.position().tensor_updates, updates_after(9, 3, engine));
    MemorySource source(engine);
    options.source = &source;
    EXPECT_TRUE(run_toy(after, options).state == expected.state) << name_of(home);
    MemorySource without(engine);
    without.set_position({.step = 3});
    options.source = &without;
    EXPECT_FALSE(run_toy(after, options).state == expected.state) << "the counts matter";
  }
}

// A checkpoint has the counts, whether it is written beside training or not, and however often a
// step leaves a block as it is before the block is saved.
TEST_F(UntouchedTest, CheckpointsHaveTheCounts) {
  for (const TierChoice home : {TierChoice::kNvme, TierChoice::kHost}) {
    config_.placement = {home, home};
    config_.memory.device_bytes = 4_MiB;
    config_.memory.save_buffers = 2;
    ToyOptions options = routed_options(4, kUntouchedActive);
    const TempDirectory root;
    const SavedCheckpoint saved = expect_exact(config_, options, root.path());
    CheckpointSource source(saved.path);
    const auto device = make_host_device({.memory_bytes = 16_MiB});
    Engine engine(config_, toy_model_of(options), *device);
    EXPECT_EQ(source.position().tensor_updates, updates_after(4, 2, engine));
    engine.restore(source);
    EXPECT_EQ(engine.position().tensor_updates, source.position().tensor_updates);
    options.steps = 3;
    Config after = config_;
    options.source = &source;
    const ToyResult second = run_toy(after, options);
    options.steps = 5;
    options.source = nullptr;
    EXPECT_TRUE(second.state == toy_oracle(config_, options).state);
  }
}

// Commits name blocks that later steps leave as they are, and hold the counts.
TEST_F(UntouchedTest, DurableStoresGoOn) {
  using enum TierChoice;
  constexpr TierChoice kHomes[][2] = {
      {kNvme, kNvme}, {kHost, kHost}, {kDevice, kHost}, {kNvme, kHost}, {kDevice, kDevice}};
  constexpr std::size_t kCount = std::size(kHomes);
  constexpr OverlapPolicy kAll[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                    OverlapPolicy::kEager};
  for (std::size_t i = 0; i < kCount; ++i) {
    const auto commit_every = static_cast<std::uint32_t>(1 + (i + 1) % 3);
    const TempDirectory directory;
    Config config = toy_config(directory.path());
    config.optimizer.untouched = UntouchedPolicy::kSkip;
    config.optimizer.clip_norm = 0;
    config.storage.state = {.name = "run-7", .commit_every = commit_every};
    config.memory.device_bytes = 16_MiB;
    config.storage.block_elements = 4096;
    ToyOptions options = routed_options(i, kUntouchedActive);
    const ModelSpec model = toy_model_of(options);
    options.steps = 11;
    const ToyResult expected = toy_oracle(config, options);
    ToyResult last;
    std::size_t part = 0;
    for (const std::uint32_t steps : {5u, 6u}) {
      const auto& homes = kHomes[(i + part) % kCount];
      config.placement = {homes[0], homes[1], homes[1] == kDevice ? kDevice : kAuto};
      config.optimizer.overlap = kAll[(i + part++) % 3];
      options.steps = steps;
      const auto device = make_host_device({.memory_bytes = 16_MiB});
      Engine engine(config, model, *device);
      last = run_toy(engine, model, *device, config, options);
      engine.close();
    }
    EXPECT_EQ(last.reports.back().step, 11u);
    EXPECT_TRUE(last.state == expected.state) << i << ", commits every " << commit_every;
    const auto device = make_host_device({.memory_bytes = 16_MiB});
    Config elsewhere = config_;
    elsewhere.memory.device_bytes = 16_MiB;
    StoreSource source("run-7", {directory.path()});
    Engine engine(elsewhere, model, *device);
    EXPECT_EQ(source.position().tensor_updates, updates_after(i, 11, engine));
    engine.restore(source);
    EXPECT_TRUE(read_state(engine) == expected.state);
  }
}

TEST_F(UntouchedTest, CountsThatCannotBeAreRefused) {
  ModelSpec model = toy_model();
  const auto device = make_host_device({.memory_bytes = 4_MiB});
  Engine engine(config_, model, *device);
  engine.initialize(toy_values());
  MemorySource source(engine);
  const auto refusal = [&](const StatePosition& position) {
    const auto other = make_host_device({.memory_bytes = 4_MiB});
    Engine next(config_, model, *other);
    source.set_position(position);
    return expect_error(ErrorCode::kInput, [&] { next.restore(source); });
  };
  const auto unit = std::ranges::find_if(
      model.units, [](const UnitSpec& spec) { return spec.tensors.size() > 1; });
  const std::string& first = unit->tensors[0].name;
  EXPECT_EQ(refusal({.step = 5, .tensor_updates = {{first, 6}}}),
            fmt::format("the state of step 5 says that tensor \"{}\" has seen 6 updates", first));
  const std::string words = refusal({.step = 5, .tensor_updates = {{first, 3}}});
  EXPECT_NE(words.find(fmt::format("\"{}\" has seen 3 updates and \"{}\" 5, but both are in unit "
                                   "\"{}\"",
                                   first, unit->tensors[1].name, unit->name)),
            std::string::npos)
      << words;
}

}  // namespace
}  // namespace sluice::test
