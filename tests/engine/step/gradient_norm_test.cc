// The norm of a step before its end: the bits that finish() reports, wherever gradients wait and
// under every policy, with all gradients or some of them. Asking changes no bit of the training.
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "engine/engine_over_queue.h"
#include "gpu/ranks/local_collectives.h"
#include "io/io_queue.h"
#include "tests/engine/ranks/sharding_cases.h"
#include "tests/support/delays.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

class GradientNorm : public testing::Test {
 protected:
  struct Run {
    StateBytes state;
    std::vector<double> finished;            // by step
    std::vector<std::vector<double>> asked;  // by step, behind each walk
  };

  // Steps of two micro-batches, of which begin_step() knows as many as `options` say.
  Run train(const StepOptions& options, double divisor, bool asks) const {
    const auto device = make_host_device({.memory_bytes = kDeviceBytes});
    Engine engine(config_, model_, *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    Run run;
    for (int i = 0; i < 2; ++i) {
      Step step = engine.begin_step(options);
      std::vector<double>& asked = run.asked.emplace_back();
      for (int walk = 0; walk < 2; ++walk) {
        walk_step(step, model_, engine, *device, stream, config_, 1);
        if (asks) asked.push_back(step.gradient_norm(divisor));
      }
      run.finished.push_back(step.finish({.gradient_divisor = divisor}).gradient_norm);
    }
    engine.drain();
    run.state = read_state(engine);
    engine.close();
    return run;
  }

  void expect_the_norms_of_finish(const StepOptions& options, double divisor) const {
    const Run plain = train(options, divisor, /*asks=*/false);
    const Run asked = train(options, divisor, /*asks=*/true);
    EXPECT_EQ(asked.state, plain.state);
    EXPECT_EQ(asked.finished, plain.finished);
    for (std::size_t i = 0; i < asked.finished.size(); ++i) {
      EXPECT_EQ(asked.asked[i].back(), plain.finished[i]) << i;
      EXPECT_LT(asked.asked[i].front(), 0.9 * plain.finished[i]) << "half of the gradients";
      EXPECT_GT(asked.asked[i].front(), 0.1 * plain.finished[i]) << "half of the gradients";
    }
  }

  static constexpr std::uint64_t kDeviceBytes = 2_MiB;
  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ModelSpec model_ = toy_model(/*frozen_units=*/{2}, /*leases=*/1, ToySize::kSmall);
};

TEST_F(GradientNorm, IsThatOfFinishAndChangesNoBit) {
  using enum OverlapPolicy;
  for (const TierChoice tier : {TierChoice::kHost, TierChoice::kNvme, TierChoice::kDevice}) {
    for (const OverlapPolicy policy : {kSerial, kDeferred, kSpeculative, kEager}) {
      // Where gradients wait outside host memory, no update is tentative.
      if (tier != TierChoice::kHost && policy == kSpeculative) continue;
      SCOPED_TRACE(fmt::format("{}, gradients in {}", name_of(policy), name_of(tier)));
      config_.placement = {TierChoice::kNvme, TierChoice::kNvme, tier};
      config_.memory.device_bytes = kDeviceBytes;
      config_.optimizer.overlap = policy;
      config_.optimizer.clip_norm = policy == kEager ? 0 : 1e-3;
      expect_the_norms_of_finish({.learning_rate = 1e-3, .micro_batches = 2}, 2);
      if (policy == kEager) continue;
      // A second micro-batch that was not announced changes gradients that were the last ones.
      expect_the_norms_of_finish({.learning_rate = 1e-3}, 4);
    }
  }
}

TEST_F(GradientNorm, AScaledLossShowsInNoNorm) {
  config_.precision.loss_scale.static_scale = 8;
  config_.optimizer.overlap = OverlapPolicy::kDeferred;
  expect_the_norms_of_finish({.learning_rate = 1e-3, .micro_batches = 2}, 2);
}

// One unit has a gradient, which finish() completes by zeros for all others.
TEST_F(GradientNorm, UnitsWithoutAGradientHaveNoPartInIt) {
  const auto device = make_host_device({.memory_bytes = kDeviceBytes});
  Engine engine(config_, model_, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  Step step = engine.begin_step({.learning_rate = 1e-3});
  walk_step(step, {{UnitId{1}, Pass::kForward, 1}, {UnitId{1}, Pass::kBackward, 2}}, engine,
            *device, stream, config_);
  const double norm = step.gradient_norm();
  EXPECT_GT(norm, 0);
  EXPECT_EQ(step.finish().gradient_norm, norm);
}

TEST_F(GradientNorm, AGradientThatIsNotFiniteGivesNaN) {
  const auto device = make_host_device({.memory_bytes = kDeviceBytes});
  config_.precision.gradients = DType::kFp32;
  Engine engine(config_, model_, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  Step step = engine.begin_step({.learning_rate = 1e-3});
  {
    const Lease lease = step.acquire(UnitId{1}, Pass::kBackward, stream);
    device->launch(stream.id(), [gradient = lease.gradient<float>(0)] {
      *gradient = std::numeric_limits<float>::infinity();
    });
  }
  EXPECT_TRUE(std::isnan(step.gradient_norm()));
  (void)expect_error(ErrorCode::kNonFinite, [&] { (void)step.finish(); });
}

TEST_F(GradientNorm, RefusesWhatItsContractForbids) {
  const auto device = make_host_device({.memory_bytes = kDeviceBytes});
  Engine engine(config_, model_, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  std::optional<Step> step(engine.begin_step({.learning_rate = 1e-3}));
  const auto refuse = [&](std::string_view words, std::optional<double> divisor = {}) {
    const std::string message =
        expect_error(ErrorCode::kInvalidArgument, [&] { (void)step->gradient_norm(divisor); });
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  refuse("gradient_norm: no unit has been through backward");
  {
    const Lease lease = step->acquire(UnitId{0}, Pass::kForward, stream);
    refuse("1 leases are held");
  }
  step.reset();
  step.emplace(engine.begin_step({.learning_rate = 1e-3}));
  walk_step(*step, model_, engine, *device, stream, config_, 1);
  for (const double divisor : {0.0, -1.0, std::numeric_limits<double>::infinity()})
    refuse("gradient_norm: gradient_divisor is", divisor);
  // None of it has changed anything.
  EXPECT_EQ(step->gradient_norm(2) * 2, step->gradient_norm());
  EXPECT_EQ(step->finish().step, 1u);
  refuse("gradient_norm: the step is over");
}

// Once armed, keeps writes until they are let go. Each of them fails then.
class FailingWrites final : public IoQueue {
 public:
  explicit FailingWrites(std::unique_ptr<IoQueue> real) : real_(std::move(real)) {}

  void arm() {
    const std::scoped_lock lock(mutex_);
    is_armed_ = true;
  }
  std::size_t held() const {
    const std::scoped_lock lock(mutex_);
    return held_.size();
  }
  void let_go() {
    std::vector<IoRequest*> held;
    {
      const std::scoped_lock lock(mutex_);
      is_armed_ = false;
      held.swap(held_);
    }
    for (IoRequest* const request : held) {
      request->error = EIO;
      request->on_complete(*request);
    }
  }

  void submit(std::span<IoRequest* const> requests) override {
    for (IoRequest* const request : requests) {
      {
        const std::scoped_lock lock(mutex_);
        if (is_armed_ && request->kind == IoKind::kWrite) {
          held_.push_back(request);
          continue;
        }
      }
      real_->submit({&request, 1});
    }
  }
  void wait_idle() override {
    let_go();
    real_->wait_idle();
  }
  IoCounters counters() const override { return real_->counters(); }
  std::string_view name() const override { return "failing writes"; }

 private:
  const std::unique_ptr<IoQueue> real_;
  mutable std::mutex mutex_;
  bool is_armed_ = false;         // guarded by mutex_
  std::vector<IoRequest*> held_;  // guarded by mutex_
};

// The last unit's gradient is on its way to storage when the norm is asked for.
TEST_F(GradientNorm, AFailedTransferIsSaid) {
  config_.placement = {TierChoice::kNvme, TierChoice::kNvme, TierChoice::kNvme};
  config_.memory.device_bytes = kDeviceBytes;
  const auto device = make_host_device({.memory_bytes = kDeviceBytes});
  FailingWrites* writes = nullptr;
  Engine engine =
      EngineOverQueue::make(config_, model_, *device, [&](std::unique_ptr<IoQueue> queue) {
        auto wrapped = std::make_unique<FailingWrites>(std::move(queue));
        writes = wrapped.get();
        return wrapped;
      });
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  Step step = engine.begin_step({.learning_rate = 1e-3});
  walk_step(step, {{UnitId{1}, Pass::kForward, 1}}, engine, *device, stream, config_);
  writes->arm();
  walk_step(step, {{UnitId{1}, Pass::kBackward, 2}}, engine, *device, stream, config_);
  const Watchdog watchdog(std::chrono::seconds(60), "no gradient is written");
  while (writes->held() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const std::jthread drive([writes] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    writes->let_go();
  });
  const std::string words = expect_error(ErrorCode::kIo, [&] { (void)step.gradient_norm(); });
  EXPECT_NE(words.find("Input/output error"), std::string::npos) << words;
}

// Two ranks that are threads. `steps` runs on each, and what it throws is returned.
std::vector<std::string> on_two_ranks(
    const Config& config,
    const std::function<void(std::uint32_t rank, Engine& engine, HostDevice& device,
                             const Stream& stream)>& steps) {
  LocalWorld world(2, {.timeout_s = 60, .sum = sum_in_order});
  std::vector<std::string> failures(2);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 2_MiB});
      const auto collectives = world.join(rank, *device);
      try {
        Engine engine(config, toy_model(), *device, collectives.get());
        engine.initialize(toy_values());
        const Stream stream(*device, "compute");
        steps(rank, engine, *device, stream);
        engine.close();
      } catch (const Error& error) {
        failures[rank] = error.what();
        collectives->abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failures;
}

TEST_F(GradientNorm, IsThatOfAllRanks) {
  for (const std::uint32_t stage : {1u, 2u, 3u}) {
    const Config config = sharded_config(directory_.path(), stage, true, DType::kBf16);
    const auto failures = on_two_ranks(
        config, [&](std::uint32_t, Engine& engine, HostDevice& device, const Stream& stream) {
          for (int i = 0; i < 3; ++i) {
            Step step = engine.begin_step({.learning_rate = 1e-3, .micro_batches = 2});
            walk_step(step, toy_model(), engine, device, stream, config, 2);
            const double norm = step.gradient_norm();
            EXPECT_EQ(step.finish().gradient_norm, norm) << stage;
          }
        });
    for (const std::string& failure : failures) EXPECT_EQ(failure, "");
  }
}

TEST_F(GradientNorm, RanksThatAskAtDifferentPointsAreNamed) {
  const Config config = sharded_config(directory_.path(), 3, true, DType::kBf16);
  const auto failures = on_two_ranks(
      config, [&](std::uint32_t rank, Engine& engine, HostDevice& device, const Stream& stream) {
        Step step = engine.begin_step({.learning_rate = 1e-3});
        walk_step(step, toy_model(), engine, device, stream, config, 1);
        if (rank == 1) (void)step.gradient_norm();
        (void)step.finish();
      });
  for (const std::string& failure : failures)
    EXPECT_NE(failure.find("in step 1 with learning rate 0.001 and 1 horizontal micro-batches, "
                           "whose norm is asked for before finish()"),
              std::string::npos)
        << failure;
}

TEST_F(GradientNorm, SumsOfRanksThatComeAtTheEndHaveNoneBefore) {
  const Config config = sharded_config(directory_.path(), 1, false, DType::kBf16);
  const auto failures = on_two_ranks(
      config, [&](std::uint32_t, Engine& engine, HostDevice& device, const Stream& stream) {
        Step step = engine.begin_step({.learning_rate = 1e-3, .micro_batches = 2});
        walk_step(step, toy_model(), engine, device, stream, config, 1);
        const std::string words =
            expect_error(ErrorCode::kUnsupported, [&] { (void)step.gradient_norm(); });
        EXPECT_NE(words.find("behind the last backward use"), std::string::npos) << words;
        walk_step(step, toy_model(), engine, device, stream, config, 1);
        const double norm = step.gradient_norm();
        EXPECT_EQ(step.finish().gradient_norm, norm);
      });
  for (const std::string& failure : failures) EXPECT_EQ(failure, "");
}

}  // namespace
}  // namespace sluice::test
