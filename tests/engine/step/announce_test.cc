// Steps that announce units on the way: nothing is planned anew, what is announced is read and
// nothing else, and the bits are those of the oracle, which does the same in plain arrays.
#include <gtest/gtest.h>

#include <cerrno>
#include <random>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "tests/engine/step/announce_cases.h"
#include "tests/support/campaign.h"
#include "tests/support/delays.h"
#include "tests/support/expect_error.h"
#include "tests/support/fault_queue.h"
#include "tests/support/same_training.h"
#include "tests/support/side_by_side.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

class AnnounceTest : public testing::Test {
 protected:
  AnnounceTest() {
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config_.memory.device_bytes = 400_KiB;
  }

  void expect_the_oracle(const ToyOptions& options, const std::string& what) {
    const ToyResult oracle = toy_oracle(config_, options);
    const ToyResult result = run_toy(config_, options);
    EXPECT_TRUE(same_training(result, oracle)) << what;
    for (std::size_t i = 0; i < result.reports.size(); ++i) {
      EXPECT_EQ(result.reports[i].gradient_norm, oracle.reports[i].gradient_norm) << what;
      EXPECT_EQ(result.reports[i].schedule_changes, 0u) << what;
      EXPECT_TRUE(result.reports[i].notes.empty()) << what << ": " << result.reports[i].notes[0];
    }
  }

  // The least device memory for `options`, as the error of one that is too small names it.
  std::uint64_t smallest_budget(const ToyOptions& options) const {
    Config config = config_;
    config.memory.device_bytes = 4_KiB;
    const auto device = make_host_device({.memory_bytes = 1_MiB});
    const std::string words = expect_error(ErrorCode::kOutOfMemory, [&] {
      const Engine engine(config, toy_model_of(options), *device);
    });
    EXPECT_NE(words.find("announced window"), std::string::npos) << words;
    const std::size_t begin = words.find("the smallest that works is \"");
    EXPECT_NE(begin, std::string::npos) << words;
    return std::stoull(words.substr(begin + 28)) << 10;
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
};

TEST_F(AnnounceTest, UnderEveryPolicyTheBitsAreTheOracles) {
  struct Case {
    OverlapPolicy policy;
    double clip_norm;
  };
  for (const Case& policy : {Case{OverlapPolicy::kSerial, 1}, Case{OverlapPolicy::kDeferred, 1},
                             Case{OverlapPolicy::kEager, 0}, Case{OverlapPolicy::kSpeculative, 1e9},
                             Case{OverlapPolicy::kSpeculative, 1}, Case{OverlapPolicy::kAuto, 0}}) {
    for (const std::uint32_t micro_batches : {1u, 3u}) {
      config_.optimizer.overlap = policy.policy;
      config_.optimizer.clip_norm = policy.clip_norm;
      ToyOptions options = routed_options(micro_batches);
      options.micro_batches = micro_batches;
      options.leases = micro_batches == 1 ? 2 : 1;
      options.announces_ahead = micro_batches == 1;
      options.evaluate = true;
      config_.memory.device_bytes = options.leases == 2 ? 500_KiB : 400_KiB;
      expect_the_oracle(options, std::string(name_of(policy.policy)));
    }
  }
}

TEST_F(AnnounceTest, WhereverParametersAndGradientsAre) {
  using enum TierChoice;
  for (const TierChoice parameters : {kNvme, kHost, kDevice, kAuto}) {
    for (const TierChoice gradients : {kHost, kNvme, kDevice}) {
      config_.placement = {.parameters = parameters, .optimizer = kNvme, .gradients = gradients};
      const std::uint64_t gradient_bytes = gradients == kDevice ? 2_MiB : 0;
      config_.memory.device_bytes = (parameters == kDevice ? 2_MiB : 800_KiB) + gradient_bytes;
      expect_the_oracle(routed_options(3),
                        fmt::format("parameters {}, gradients {}", static_cast<int>(parameters),
                                    static_cast<int>(gradients)));
    }
  }
}

// The device has one place for experts, and all experts of a layer come before the first of them
// comes again: so every use is one read, of the unit's slots on storage and nothing else.
TEST_F(AnnounceTest, AHundredStepsReadWhatTheyAnnounce) {
  config_.optimizer.overlap = OverlapPolicy::kSerial;
  constexpr std::uint32_t kActive = 2;
  ToyOptions options = routed_options(5, kActive);
  options.steps = 100;
  options.size = ToySize::kSmall;
  config_.memory.device_bytes = smallest_budget(options);
  const auto device = make_host_device({.memory_bytes = *config_.memory.device_bytes});
  const ModelSpec model = toy_model_of(options);
  Engine engine(config_, model, *device);
  ASSERT_EQ(placement_of(engine).announced_window.count, 1u);
  const ToyResult result = run_toy(engine, model, *device, config_, options);
  for (std::uint64_t step = 1; step <= options.steps; ++step) {
    ToyUses uses;
    for (std::uint32_t unit = 0; unit < kFirstExpert; ++unit)
      uses.push_back({UnitId{unit}, Pass::kForward});
    route(5, step, uses, kActive);
    std::uint64_t bytes = 0;
    for (const ToyUse& use : uses) {
      if (index_of(use.unit) < kFirstExpert) continue;
      for (const BlockPlace& block : layout_of(engine).blocks_of(use.unit))  // forward and backward
        bytes += 2 * align_up(block.element_count * 2, 4096);
    }
    const StepReport& report = result.reports[step - 1];
    EXPECT_EQ(report.schedule_changes, 0u);
    EXPECT_EQ(report.announced_uses, 2 * kLayers * kActive);
    EXPECT_EQ(report.announced_read_bytes, bytes);
    EXPECT_EQ(report.nvme_read_bytes, result.predicted.nvme_read_bytes + bytes);
    EXPECT_EQ(report.nvme_write_bytes, result.predicted.nvme_write_bytes);
  }
  EXPECT_TRUE(same_training(result, toy_oracle(config_, options)));
}

// Experts that stay in their places are not read again; here are eight.
TEST_F(AnnounceTest, ExpertsThatStayAreReadOnce) {
  config_.optimizer.overlap = OverlapPolicy::kSerial;
  ToyOptions options = routed_options(5, 2);
  options.leases = 6;  // and so eight places
  config_.memory.device_bytes = 1400_KiB;
  const ToyResult result = run_toy(config_, options);
  EXPECT_TRUE(same_training(result, toy_oracle(config_, options)));
  for (std::uint64_t step = 1; step <= options.steps; ++step) {
    const StepReport& report = result.reports[step - 1];
    EXPECT_EQ(report.announced_uses, 16u);
    EXPECT_EQ(report.nvme_read_bytes,
              result.predicted.nvme_read_bytes + report.announced_read_bytes);
  }
}

// Gradients that wait on storage: those of announced units come there whether or not a step uses
// the units, and each further use of a unit is one more sum.
TEST_F(AnnounceTest, GradientsOnStorageMoveWhatIsPredicted) {
  config_.placement.gradients = TierChoice::kNvme;
  config_.optimizer.overlap = OverlapPolicy::kSerial;
  ToyOptions options = routed_options(7);
  options.micro_batches = 3;
  const ToyResult result = run_toy(config_, options);
  EXPECT_TRUE(same_training(result, toy_oracle(config_, options)));
  std::uint64_t further_bytes = 0;
  for (const StepReport& report : result.reports) {
    EXPECT_EQ(report.nvme_write_bytes,
              result.predicted.nvme_write_bytes + report.announced_update_bytes);
    EXPECT_EQ(report.nvme_read_bytes, result.predicted.nvme_read_bytes +
                                          report.announced_read_bytes +
                                          report.announced_update_bytes);
    further_bytes += report.announced_update_bytes;
  }
  EXPECT_GT(further_bytes, 0u) << "some experts come in two micro-batches";
  options.change = {};  // no announced unit
  const ToyResult plain = run_toy(config_, options);
  for (const StepReport& report : plain.reports) {
    EXPECT_EQ(report.announced_update_bytes, 0u);
    EXPECT_EQ(report.nvme_write_bytes, plain.predicted.nvme_write_bytes);
    EXPECT_EQ(report.nvme_read_bytes, plain.predicted.nvme_read_bytes);
  }
}

TEST_F(AnnounceTest, RandomRoutesUnderDelays) {
  side_by_side(seeds_of(campaign(25)), [&](std::uint64_t seed) {
    Config config = config_;
    std::mt19937_64 random(seed);
    constexpr OverlapPolicy kAll[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                      OverlapPolicy::kEager, OverlapPolicy::kSpeculative};
    config.optimizer.overlap = kAll[random() % 4];
    config.optimizer.clip_norm =
        config.optimizer.overlap == OverlapPolicy::kEager ? 0 : (random() % 2 == 0 ? 1e9 : 1);
    config.optimizer.lanes = 1 + random() % 5;
    const auto leases = static_cast<std::uint32_t>(1 + random() % 3);
    config.memory.device_bytes = 300_KiB + (leases - 1) * 150_KiB + random() % 8 * 40_KiB;
    ToyOptions options = routed_options(seed);
    options.micro_batches = static_cast<std::uint32_t>(1 + random() % 3);
    options.evaluate = random() % 2 == 0;
    options.streams = static_cast<std::uint32_t>(1 + random() % 2);
    options.leases = leases;
    options.announces_ahead = random() % 2 == 0;
    const auto device = make_delayed_device(
        make_host_device({.memory_bytes = *config.memory.device_bytes}), seed, 50);
    const ModelSpec model = toy_model_of(options);
    Engine engine =
        EngineOverQueue::make(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
          return make_fault_queue(std::move(queue), {.seed = seed, .delay_us_max = 100});
        });
    const ToyResult result = run_toy(engine, model, *device, config, options);
    EXPECT_TRUE(same_training(result, toy_oracle(config, options))) << "seed " << seed;
    for (const StepReport& report : result.reports) EXPECT_EQ(report.schedule_changes, 0u);
  });
}

// Other units may leave the schedule meanwhile, as ever.
TEST_F(AnnounceTest, BesideChangesOfTheSchedule) {
  for (const std::uint32_t micro_batches : {1u, 2u}) {
    ToyOptions options = routed_options(7);
    options.micro_batches = micro_batches;
    options.change = [](std::uint64_t step, ToyUses& uses) {
      if (step == 2) std::swap(uses[2], uses[4]);
      if (step == 3) uses.resize(uses.size() - 2);
      route(7, step, uses);
    };
    const ToyResult result = run_toy(config_, options);
    EXPECT_TRUE(same_training(result, toy_oracle(config_, options)));
    EXPECT_EQ(result.reports[0].schedule_changes, 0u);
    EXPECT_GT(result.reports[1].schedule_changes, 0u);
  }
}

class AnnounceCalls : public AnnounceTest {
 protected:
  AnnounceCalls() { engine_.initialize(toy_values()); }
  std::string refusal(const auto& call) { return expect_error(ErrorCode::kInvalidArgument, call); }

  const ToyOptions options_ = routed_options(1);
  const ModelSpec model_ = toy_model_of(options_);
  const std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 400_KiB});
  Engine engine_{config_, model_, *device_};
  const Stream stream_{*device_, "compute"};
};

TEST_F(AnnounceCalls, WrongCallsAreNamedAndChangeNothing) {
  const UnitId expert{kFirstExpert}, other{kFirstExpert + 1};
  const auto has = [](const std::string& words, const char* what) {
    EXPECT_NE(words.find(what), std::string::npos) << words;
  };
  {
    Step step = engine_.begin_step({.learning_rate = 1e-2});
    has(refusal([&] {
          step.announce(std::vector{expert, UnitId{999}}, Pass::kForward);
        }),
        "unit 999 does not exist; the model has 26");
    has(refusal([&] {
          step.announce(std::vector{expert, UnitId{2}}, Pass::kForward);
        }),
        "unit \"h.1\" stands in the model's orders");
    has(refusal([&] {
          step.announce(std::vector{expert, other, expert}, Pass::kForward);
        }),
        "unit \"expert.0\" is given twice");
    has(refusal([&] { step.announce(std::vector{expert}, Pass::kInference); }),
        "pass \"inference\" does not belong to a training step");
    has(refusal([&] { step.announce(std::vector{expert}, Pass{9}); }),
        "announce: there is no pass 9");
    // Too late: used first, announced afterwards.
    has(refusal([&] { (void)step.acquire(expert, Pass::kForward, stream_); }),
        "unit \"expert.0\" (forward) has not been announced");
    EXPECT_EQ(step.announce(std::vector{other, expert}, Pass::kForward),
              (std::vector{other, expert}));
    has(refusal([&] { (void)step.acquire(expert, Pass::kForward, stream_); }),
        "is used before \"expert.1\" (forward), which was announced earlier");
    has(refusal([&] { (void)step.acquire(other, Pass::kBackward, stream_); }),
        "unit \"expert.1\" (backward) has not been announced");
    (void)step.acquire(other, Pass::kForward, stream_);
    (void)step.acquire(expert, Pass::kForward, stream_);
    walk_step(step, model_, engine_, *device_, stream_, config_, 1);
    EXPECT_EQ(step.announce(std::vector{other}, Pass::kBackward), std::vector{other});
    has(refusal([&] { (void)step.finish(); }),
        "unit \"expert.1\" (backward) has been announced and not acquired");
    (void)step.acquire(other, Pass::kBackward, stream_);
    EXPECT_EQ(step.finish().schedule_changes, 0u);
  }
  ToyOptions plain = options_;  // an expert whose gradient is zero is as one without
  plain.steps = 1;
  plain.change = {};
  EXPECT_TRUE(read_state(engine_) == toy_oracle(config_, plain).state);
  Inference inference = engine_.begin_inference();
  EXPECT_EQ(inference.announce(std::vector{expert}), std::vector{expert});
  has(refusal([&] { (void)inference.acquire(other, stream_); }), "has not been announced");
  (void)inference.acquire(expert, stream_);
}

TEST_F(AnnounceCalls, LeasesOfBothKindsCount) {
  Step step = engine_.begin_step({.learning_rate = 1e-2});
  step.announce(std::vector{UnitId{kFirstExpert}}, Pass::kForward);
  const Lease held = step.acquire(UnitId{0}, Pass::kForward, stream_);
  const std::string words =
      refusal([&] { (void)step.acquire(UnitId{kFirstExpert}, Pass::kForward, stream_); });
  EXPECT_NE(words.find("the lease on unit \"embedding\" (forward) is still held"),
            std::string::npos)
      << words;
}

// A step that is abandoned with announced fetches under way leaves nothing behind.
TEST_F(AnnounceCalls, AbandonedStepsAreForgotten) {
  for (int round = 0; round < 5; ++round) {
    Step step = engine_.begin_step({.learning_rate = 1e-2});
    step.announce(routed(round, 0, 4), Pass::kForward);
    if (round % 2 == 1) (void)step.acquire(routed(round, 0, 4)[0], Pass::kForward, stream_);
  }
  Step step = engine_.begin_step({.learning_rate = 1e-2});
  walk_step(step, model_, engine_, *device_, stream_, config_, 1);
  EXPECT_EQ(step.finish().step, 1u);
  ToyOptions plain = options_;
  plain.steps = 1;
  plain.change = {};
  EXPECT_TRUE(read_state(engine_) == toy_oracle(config_, plain).state);
}

// The drive fails from one of the first requests behind initialize() on.
TEST_F(AnnounceTest, AFailedTransferIsSaid) {
  const ModelSpec model = toy_model_of(routed_options(1));
  const auto device = make_host_device({.memory_bytes = *config_.memory.device_bytes});
  const Stream stream(*device, "compute");
  for (std::uint64_t at = 16;; at += 16) {
    Engine engine =
        EngineOverQueue::make(config_, model, *device, [&](std::unique_ptr<IoQueue> queue) {
          return make_fault_queue(std::move(queue), {.at = at, .error = EIO, .sticky = true});
        });
    try {
      engine.initialize(toy_values());
    } catch (const Error&) {
      continue;
    }
    Step step = engine.begin_step({.learning_rate = 1e-2});
    (void)expect_error(ErrorCode::kIo, [&] {
      for (std::uint32_t layer = 0; layer < kLayers; ++layer)
        for (const UnitId unit : step.announce(routed(1, layer, 5), Pass::kForward))
          (void)step.acquire(unit, Pass::kForward, stream);
    });
    (void)expect_error(ErrorCode::kIo, [&] { step.announce(routed(1, 0, 2), Pass::kForward); });
    return;
  }
}

TEST(AnnounceWithoutUnits, IsRefused) {
  const TempDirectory directory;
  const Config config = toy_config(directory.path());
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  Engine engine(config, toy_model(), *device);
  engine.initialize(toy_values());
  Step step = engine.begin_step({.learning_rate = 1e-2});
  const std::string words = expect_error(
      ErrorCode::kInvalidArgument, [&] { step.announce(std::vector{UnitId{0}}, Pass::kForward); });
  EXPECT_NE(words.find("set UnitSpec::is_announced"), std::string::npos) << words;
}

// The smallest budget that the error names has room for them, and works.
TEST_F(AnnounceTest, TheWindowForAnnouncedUnitsIsPartOfTheBudget) {
  config_.memory.device_bytes = smallest_budget(routed_options(1));
  expect_the_oracle(routed_options(1), "the smallest budget");
  EXPECT_GT(*config_.memory.device_bytes, 60_KiB);
}

}  // namespace
}  // namespace sluice::test
