// Boundary activations that the engine keeps: every byte that is loaded is what was saved, in every
// home, order, window and number of slots, while drives delay, fail and lie; bytes moved are those
// predicted.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <random>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/plan/activation_plan.h"
#include "tests/support/campaign.h"
#include "tests/support/delays.h"
#include "tests/support/expect_error.h"
#include "tests/support/fault_queue.h"
#include "tests/support/relay_training.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

Config relay_config(const std::string& path, const Config::Activations& activations) {
  Config config = config_of_environment();
  config.storage.paths = {path};
  config.storage.block_elements = 4096;
  config.memory.device_bytes = 64_MiB;
  config.memory.host_bytes = 64_MiB;
  config.placement = {.parameters = TierChoice::kHost,
                      .optimizer = TierChoice::kHost,
                      .gradients = TierChoice::kHost};
  config.activations = activations;
  config.threads = 2;
  return config;
}

// The most of a step's activations that storage held, by phase.
std::uint64_t on_storage(const StepReport& report, StepPhase phase) {
  return report.buffers[static_cast<std::size_t>(phase)].most(MemoryPool::kNvmeActivations);
}

void expect_storage_marks(const StepReport& report, const ModelSpec& model,
                          const Config::Activations& activations, std::uint32_t micro_batches,
                          std::uint32_t places) {
  const ActivationShape shape{model, micro_batches, activations.order};
  const std::uint64_t most_bytes = activations.home == ActivationHome::kNvme
                                       ? plan_activations(shape, places).at_home_most_bytes
                                       : 0;
  EXPECT_LE(on_storage(report, StepPhase::kForward), most_bytes);
  EXPECT_LE(on_storage(report, StepPhase::kBackward), most_bytes);
  EXPECT_EQ(on_storage(report, StepPhase::kOptimizer), 0u) << "all have been loaded";
}

// The smallest budget that the message of a budget too small names.
std::uint64_t smallest_named(const std::string& message) {
  const std::size_t begin = message.find("the smallest that works is \"");
  EXPECT_NE(begin, std::string::npos) << message;
  return std::stoull(message.substr(begin + 28)) << 10;
}

// Takes away all that can be spared.
void shrink(Config& config, const ModelSpec& model) {
  const auto device = make_host_device({.memory_bytes = 1_GiB});
  for (auto* budget : {&config.memory.device_bytes, &config.memory.host_bytes}) {
    *budget = 4096;
    const std::string message =
        expect_error(ErrorCode::kOutOfMemory, [&] { const Engine engine(config, model, *device); });
    *budget = smallest_named(message);
  }
}

class Rolls {
 public:
  explicit Rolls(std::uint64_t seed) : random_(seed) {}
  std::uint32_t draw(std::uint32_t low, std::uint32_t high) {
    return std::uniform_int_distribution<std::uint32_t>(low, high)(random_);
  }
  template <class T>
  T pick(const std::vector<T>& choices) {
    return choices[draw(0, static_cast<std::uint32_t>(choices.size()) - 1)];
  }

 private:
  std::mt19937_64 random_;
};

TEST(ActivationFlow, EveryLoadBringsWhatWasSaved) {
  for (const std::uint64_t seed : seeds_of(campaign(60))) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rolls rolls(seed);
    const Watchdog watchdog(std::chrono::minutes(5), "seed " + std::to_string(seed) + " hangs");
    const TempDirectory directory;
    const std::uint32_t units = rolls.draw(2, 7);
    const bool is_tied = rolls.draw(0, 2) == 0;
    std::vector<std::uint64_t> bytes(is_tied ? units : units - 1);
    for (std::uint64_t& size : bytes) size = rolls.draw(1, 20000);
    const ModelSpec model = relay_model(units, bytes, rolls.draw(1, 3), is_tied);
    const Config::Activations activations{
        .home = rolls.pick<ActivationHome>(
            {ActivationHome::kRecompute, ActivationHome::kHost, ActivationHome::kNvme}),
        .micro_batches = rolls.draw(1, 4),
        .order = rolls.pick<MicroBatchOrder>(
            {MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical})};
    const ModelSpec valid = validated(model);
    Config config = relay_config(directory.path(), activations);
    if (rolls.draw(0, 1) == 0)
      config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
    config.optimizer.overlap =
        rolls.pick<OverlapPolicy>({OverlapPolicy::kSerial, OverlapPolicy::kDeferred});
    config.storage.backend =
        rolls.pick<IoBackend>({IoBackend::kAuto, IoBackend::kThreads, IoBackend::kSync});
    if (rolls.draw(0, 1) == 0) shrink(config, model);
    const std::uint32_t delay_us = rolls.pick<std::uint32_t>({0, 300});
    std::optional<TaskDelays> task_delays;
    if (delay_us != 0) task_delays.emplace(seed, delay_us);
    Relay relay(config, model, rolls.draw(1, 3),
                [&](std::unique_ptr<IoQueue> queue) -> std::unique_ptr<IoQueue> {
                  if (delay_us == 0) return queue;
                  return make_fault_queue(std::move(queue),
                                          {.seed = seed, .delay_us_max = delay_us});
                },
                {.seed = seed,
                 .us_max = delay_us,
                 .copy_bytes_per_second = rolls.pick<std::uint64_t>({0, 200'000'000})});
    const std::uint32_t places = placement_of(relay.engine()).activation_window.count;
    for (std::uint32_t i = 0; i < 3; ++i) {
      const bool abandons = rolls.draw(0, 3) == 0;
      if (abandons)
        relay.abandon_after(rolls.draw(0, 2 * units), activations.micro_batches, activations.order);
      if (rolls.draw(0, 2) == 0) relay.evaluate();
      const std::uint32_t micro_batches = rolls.draw(1, activations.micro_batches);
      const StepReport report = relay.step(micro_batches, activations.order);
      if (abandons) continue;  // what that moved is in the report too
      const Traffic predicted = relay.engine().predicted_traffic(micro_batches, activations.order);
      EXPECT_EQ(report.activation_out_bytes, predicted.activation_out_bytes);
      EXPECT_EQ(report.activation_in_bytes, predicted.activation_in_bytes);
      expect_storage_marks(report, valid, activations, micro_batches, places);
      if (config.optimizer.overlap == OverlapPolicy::kSerial) {
        EXPECT_EQ(report.nvme_read_bytes, predicted.nvme_read_bytes);
        EXPECT_EQ(report.nvme_write_bytes, predicted.nvme_write_bytes);
      }
    }
    relay.engine().drain();
    EXPECT_EQ(relay.wrong(), 0u) << "of " << relay.seen() << ", " << places << " places";
    EXPECT_GT(relay.seen(), 0u);
  }
}

// More than one piece, one place fewer than helps, one staging slot.
TEST(ActivationFlow, LargeActivationsTravelInPieces) {
  const TempDirectory directory;
  const ModelSpec model = relay_model(7, std::vector<std::uint64_t>(6, 9_MiB + 100));
  Config config = relay_config(directory.path(), {.home = ActivationHome::kNvme});
  shrink(config, model);
  Relay relay(config, model);
  EXPECT_EQ(placement_of(relay.engine()).activation_staging.count, 1u);
  EXPECT_EQ(placement_of(relay.engine()).activation_staging.slot_bytes, 4_MiB);
  const StepReport report = relay.step(1, MicroBatchOrder::kHorizontal);
  const ModelSpec valid = validated(model);
  const ActivationPlan plan =
      plan_activations({.model = valid}, placement_of(relay.engine()).activation_window.count);
  EXPECT_GT(plan.at_home_most_bytes, 9_MiB);
  EXPECT_EQ(
      std::max(on_storage(report, StepPhase::kForward), on_storage(report, StepPhase::kBackward)),
      plan.at_home_most_bytes);
  relay.engine().drain();
  EXPECT_GT(report.activation_out_bytes, 9_MiB);
  EXPECT_EQ(report.nvme_write_bytes, report.activation_out_bytes) << "all else is in memory";
  EXPECT_EQ(report.nvme_read_bytes, report.activation_in_bytes);
  EXPECT_EQ(relay.wrong(), 0u);
}

// Wherever a transfer fails or the drive lies, the run ends with an error that says so, or with
// the right bytes; never with wrong ones, and never not at all.
TEST(ActivationFlow, FaultsAreErrors) {
  const ModelSpec model = relay_model(5, std::vector<std::uint64_t>(4, 6000));
  std::uint32_t errors_of_activations = 0;
  for (const Fault fault : {Fault::kErrno, Fault::kBitFlip, Fault::kLostWrite, Fault::kMisdirected,
                            Fault::kHalf, Fault::kReordered}) {
    for (std::uint64_t at = 0; at < 40; at += 3) {
      SCOPED_TRACE(std::to_string(static_cast<int>(fault)) + " at " + std::to_string(at));
      const TempDirectory directory;
      Config config = relay_config(
          directory.path(),
          {.home = ActivationHome::kNvme, .micro_batches = 2, .order = MicroBatchOrder::kVertical});
      shrink(config, model);
      Relay relay(config, model, 1, [&](std::unique_ptr<IoQueue> queue) {
        return make_fault_queue(std::move(queue), {.fault = fault, .at = at, .error = ENXIO});
      });
      try {
        for (int i = 0; i < 2; ++i) (void)relay.step(2, MicroBatchOrder::kVertical);
        relay.engine().drain();
      } catch (const Error& error) {
        const std::string message = error.what();
        EXPECT_NE(message.find("activations of unit \"u"), std::string::npos) << message;
        EXPECT_NE(message.find("piece 0"), std::string::npos) << message;
        EXPECT_NE(message.find(directory.path()), std::string::npos) << message;
        ++errors_of_activations;
      }
      EXPECT_EQ(relay.wrong(), 0u);
    }
  }
  EXPECT_GT(errors_of_activations, 20u);
}

TEST(ActivationFlow, AStepLargerThanDeclaredIsRefused) {
  const TempDirectory directory;
  const ModelSpec model = relay_model(4, {4096, 4096, 4096});
  for (const ActivationHome home :
       {ActivationHome::kRecompute, ActivationHome::kHost, ActivationHome::kNvme}) {
    Relay relay(
        relay_config(directory.path(),
                     {.home = home, .micro_batches = 2, .order = MicroBatchOrder::kVertical}),
        model);
    const std::string message = expect_error(ErrorCode::kInvalidArgument, [&] {
      (void)relay.step(home == ActivationHome::kRecompute ? 9 : 3, MicroBatchOrder::kVertical);
    });
    EXPECT_NE(message.find("more activations than the pools hold"), std::string::npos) << message;
    (void)relay.step(5, MicroBatchOrder::kHorizontal);
    (void)relay.step(2, MicroBatchOrder::kVertical);
    EXPECT_EQ(relay.wrong(), 0u);
  }
}

// A horizontal step has one micro-batch's activations at once, so it may have more micro-batches
// than the declared step: they share the homes at each boundary, however many there are.
TEST(ActivationFlow, AHorizontalStepMayHaveMoreMicroBatchesThanDeclared) {
  const TempDirectory directory;
  std::vector<std::uint64_t> bytes(13, 20000);
  bytes[1] = 100;  // its homes lie between larger ones
  const ModelSpec model = relay_model(14, bytes);
  for (const ActivationHome home : {ActivationHome::kHost, ActivationHome::kNvme}) {
    SCOPED_TRACE(name_of(home));
    Config config = relay_config(
        directory.path(), {.home = home, .micro_batches = 2, .order = MicroBatchOrder::kVertical});
    shrink(config, model);
    Relay relay(config, model);
    for (const std::uint32_t micro_batches : {3u, 5u})
      EXPECT_GT(relay.step(micro_batches, MicroBatchOrder::kHorizontal).activation_out_bytes, 0u);
    (void)relay.step(2, MicroBatchOrder::kVertical);
    relay.engine().drain();
    EXPECT_EQ(relay.wrong(), 0u) << "of " << relay.seen();
  }
}

// The declared step has fewer activations than an application may hold at once, other steps more.
TEST(ActivationFlow, ASmallDeclaredStepLeavesPlacesForOthers) {
  const TempDirectory directory;
  for (const ActivationHome home :
       {ActivationHome::kRecompute, ActivationHome::kHost, ActivationHome::kNvme}) {
    for (const std::uint32_t leases : {1u, 2u, 3u}) {
      SCOPED_TRACE(std::string(name_of(home)) + ", leases " + std::to_string(leases));
      const ModelSpec model = relay_model(2, {4096}, leases);
      Config config = relay_config(directory.path(), {.home = home});
      shrink(config, model);
      Relay relay(config, model);
      for (const std::uint32_t micro_batches : {1u, 2u, 5u})
        (void)relay.step(micro_batches, MicroBatchOrder::kHorizontal);
      const auto refuse = [](const auto& call) {
        EXPECT_NE(expect_error(ErrorCode::kInvalidArgument, call).find("more activations than"),
                  std::string::npos);
      };
      refuse([&] { (void)relay.engine().predicted_traffic(9, MicroBatchOrder::kVertical); });
      refuse([&] { (void)relay.step(9, MicroBatchOrder::kVertical); });
      (void)relay.step(2, MicroBatchOrder::kHorizontal);
      relay.engine().drain();
      EXPECT_EQ(relay.wrong(), 0u) << "of " << relay.seen();
    }
  }
}

class ActivationCalls : public testing::Test {
 protected:
  ActivationCalls()
      : relay_(relay_config(directory_.path(), {.home = ActivationHome::kHost}),
               relay_model(3, {100, 200})),
        stream_(relay_.device(), "compute") {}

  TempDirectory directory_;
  Relay relay_;
  Stream stream_;
};

TEST_F(ActivationCalls, ComeInSequence) {
  Step step = relay_.engine().begin_step({.learning_rate = 1e-3});
  const auto refuse = [&](const auto& call) {
    return expect_error(ErrorCode::kInvalidArgument, call);
  };
  EXPECT_NE(refuse([&] {
              (void)step.load({.boundary = 0}, stream_);
            }).find("save activation 0 of micro-batch 0 is next (sluice/step.h"),
            std::string::npos);
  EXPECT_NE(refuse([&] { (void)step.save({.boundary = 1}, stream_); }).find("is next"),
            std::string::npos);
  ActivationLease held = step.save({.boundary = 0}, stream_);
  EXPECT_NE(refuse([&] { (void)step.load({.boundary = 0}, stream_); }).find("still held"),
            std::string::npos);
  EXPECT_NE(held.data(), nullptr);
  held.release();
  EXPECT_NE(refuse([&] { (void)held.data(); }).find("released"), std::string::npos);
  (void)step.load({.boundary = 0}, stream_);
}

// The options are checked before the step is planned, whose plan would take all memory.
TEST_F(ActivationCalls, AStepOfTooManyMicroBatchesIsRefusedAtOnce) {
  const std::string message = expect_error(ErrorCode::kInvalidArgument, [&] {
    (void)relay_.engine().begin_step({.learning_rate = 1e-3, .micro_batches = 4'000'000'000});
  });
  EXPECT_NE(message.find("begin_step: micro_batches is 4000000000; a step has at most 65536"),
            std::string::npos)
      << message;
}

// The plan counts on the end of an access before the third one after it, which would otherwise wait
// for a place that never becomes free.
TEST_F(ActivationCalls, OneThatIsHeldTooLongIsNamed) {
  Step step = relay_.engine().begin_step({.learning_rate = 1e-3});
  (void)step.save({.boundary = 0}, stream_);
  const ActivationLease kept = step.load({.boundary = 0}, stream_);
  (void)step.save({.boundary = 1}, stream_);
  (void)step.load({.boundary = 1}, stream_);
  EXPECT_NE(
      expect_error(ErrorCode::kInvalidArgument, [&] { (void)step.load({.boundary = 1}, stream_); })
          .find("load activation 0 of micro-batch 0 is still held"),
      std::string::npos);
}

// Computation on a stream that no unit's gradient waits for may go on when the step is over.
TEST(ActivationFlow, AStreamMayBeLate) {
  const TempDirectory directory;
  const ModelSpec model = relay_model(4, {20000, 20000, 20000});
  Config config = relay_config(directory.path(), {.home = ActivationHome::kHost});
  shrink(config, model);
  Relay relay(config, model);
  const Stream stream(relay.device(), "compute");
  const Stream late(relay.device(), "late");
  const auto gradient = [](std::uint32_t boundary) {
    return ActivationRef{.boundary = boundary, .kind = ActivationKind::kGradient};
  };
  Step step = relay.engine().begin_step({.learning_rate = 1e-3});
  for (const std::uint32_t unit : {0u, 1u, 2u, 3u}) {
    const Lease lease = step.acquire(UnitId{unit}, Pass::kForward, stream);
    if (unit > 0) (void)step.load({.boundary = unit - 1}, stream);
    if (unit < 3) (void)step.save({.boundary = unit}, stream);
  }
  for (const std::uint32_t unit : {3u, 2u, 1u, 0u}) {
    const Lease lease = step.acquire(UnitId{unit}, Pass::kBackward, stream);
    if (unit > 0) (void)step.load({.boundary = unit - 1}, stream);
    if (unit == 1)
      relay.device().launch(late.id(),
                            [] { std::this_thread::sleep_for(std::chrono::milliseconds(300)); });
    if (unit < 3) (void)step.load(gradient(unit), unit == 0 ? late : stream);
    if (unit > 0) (void)step.save(gradient(unit - 1), unit == 1 ? late : stream);
  }
  const StepTimes times = step.finish().times;
  EXPECT_GT(times.compute_ns, 0);
  EXPECT_EQ(times.compute_ns + times.exposed_ns() + times.other_ns, times.total_ns);
}

TEST_F(ActivationCalls, AStepWithoutThemIsNotOver) {
  Step step = relay_.engine().begin_step({.learning_rate = 1e-3});
  for (const std::uint32_t unit : {0u, 1u, 2u})
    (void)step.acquire(UnitId{unit}, Pass::kForward, stream_);
  for (const std::uint32_t unit : {2u, 1u, 0u})
    (void)step.acquire(UnitId{unit}, Pass::kBackward, stream_);
  EXPECT_NE(expect_error(ErrorCode::kInvalidArgument, [&] { (void)step.finish(); })
                .find("save activation 0 of micro-batch 0 is next"),
            std::string::npos);
}

TEST(ActivationConfig, SaysWhatDoesNotFit) {
  const TempDirectory directory;
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  ModelSpec model = relay_model(3, {});
  Config config = relay_config(directory.path(), {.home = ActivationHome::kNvme});
  EXPECT_NE(expect_error(ErrorCode::kInvalidArgument,
                         [&] { const Engine engine(config, model, *device); })
                .find("boundary_bytes"),
            std::string::npos);
  model.boundary_bytes = {100};
  expect_error(ErrorCode::kInvalidArgument, [&] { (void)validated(model); });
  model.boundary_bytes = {100, 0};
  expect_error(ErrorCode::kInvalidArgument, [&] { (void)validated(model); });
  model.boundary_bytes = {100, 100};
  model.backward_order = {UnitId{0}, UnitId{1}, UnitId{2}};
  expect_error(ErrorCode::kInvalidArgument, [&] { (void)validated(model); });
  // Kept by the application: nothing to save to.
  Relay relay(relay_config(directory.path(), {}), relay_model(3, {100, 100}));
  EXPECT_EQ(placement_of(relay.engine()).activation_window.size_bytes(), 0u);
  EXPECT_NE(expect_error(ErrorCode::kInvalidArgument,
                         [&] { (void)relay.step(1, MicroBatchOrder::kHorizontal); })
                .find("keeps no activations"),
            std::string::npos);
}

}  // namespace
}  // namespace sluice::test
