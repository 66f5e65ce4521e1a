// Commits of steps that leave a unit as it is while a read of a cancelled step still holds its
// blocks (optimizer.untouched "skip").
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <sluice/units.h>
#include "engine/engine_over_queue.h"
#include "tests/support/hang_guard.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

// Keeps reads waiting while it is closed.
class ReadGate final : public IoQueue {
 public:
  explicit ReadGate(std::unique_ptr<IoQueue> inner) : inner_(std::move(inner)) {}
  ~ReadGate() override { open(); }

  void submit(std::span<IoRequest* const> requests) override {
    const std::scoped_lock lock(mutex_);
    for (IoRequest* const request : requests) {
      if (request->kind == IoKind::kRead && is_closed_)
        held_.push_back(request);
      else
        inner_->submit({&request, 1});
    }
  }
  void wait_idle() override {
    open();
    inner_->wait_idle();
  }
  IoCounters counters() const override { return inner_->counters(); }
  std::string_view name() const override { return inner_->name(); }

  void close() {
    const std::scoped_lock lock(mutex_);
    is_closed_ = true;
  }
  void open() {
    const std::scoped_lock lock(mutex_);
    is_closed_ = false;
    for (IoRequest* const request : std::exchange(held_, {})) inner_->submit({&request, 1});
  }
  std::size_t held() {
    const std::scoped_lock lock(mutex_);
    return held_.size();
  }

 private:
  std::unique_ptr<IoQueue> inner_;
  std::mutex mutex_;
  bool is_closed_ = false;  // guarded by mutex_, as is held_
  std::vector<IoRequest*> held_;
};

class LeftBlock : public testing::Test {
 protected:
  static constexpr UnitId kAlways{0}, kSeldom{1};

  LeftBlock() { (void)engine_->open_or_create(toy_values()); }

  static Config config_of(const std::string& path) {
    Config config = toy_config(path);
    config.placement = {TierChoice::kHost, TierChoice::kNvme, TierChoice::kHost};
    config.memory.device_bytes = 1_MiB;
    config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
    config.storage.state = {.name = "run-7", .commit_every = 1};
    config.optimizer.overlap = OverlapPolicy::kDeferred;
    config.optimizer.untouched = UntouchedPolicy::kSkip;
    config.optimizer.non_finite = NonFinitePolicy::kSkip;
    return config;
  }
  static ModelSpec model_of() {
    ModelSpec model;
    for (const char* name : {"always", "seldom"})
      model.units.push_back({.name = name, .tensors = {{.name = name, .shape = {3000}}}});
    model.units[1].is_announced = true;
    return model;
  }

  Step begin() { return engine_->begin_step({.learning_rate = 1e-2}); }
  void use(Step& step, UnitId unit, float gradient) {
    if (unit == kSeldom) step.announce(std::vector{unit}, Pass::kBackward);
    if (unit == kAlways) (void)step.acquire(unit, Pass::kForward, stream_);
    const Lease lease = step.acquire(unit, Pass::kBackward, stream_);
    auto* const values = lease.gradient<float>(0);
    device_->launch(stream_.id(), [values, gradient] { std::fill_n(values, 3000, gradient); });
  }
  void await_commit(std::uint64_t step) const {
    const HangGuard guard("a commit of a step that has left a unit as it is");
    while (engine_->committed_step() != step)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // A step with both units, whose records' reads wait at the gate when it returns.
  Step step_with_held_reads(float gradient_of_always) {
    {
      Step first = begin();
      use(first, kAlways, 1);
      use(first, kSeldom, 1);
      (void)first.finish();
    }
    await_commit(1);
    gate_->close();
    Step step = begin();
    use(step, kSeldom, 1);
    use(step, kAlways, gradient_of_always);
    const HangGuard guard("reads that do not come");
    while (gate_->held() < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return step;
  }
  // The update of the step that comes instead, without the second unit.
  void expect_the_commit_of_the_retry() {
    {
      Step retry = begin();
      use(retry, kAlways, 1);
      const StepReport report = retry.finish();
      EXPECT_EQ(report.step, 2u);
      EXPECT_EQ(report.untouched_units, 1u);
    }
    EXPECT_GE(gate_->held(), 2u) << "the lanes are to be busy when the update is applied";
    gate_->open();
    await_commit(2);
    Step next = begin();  // the lanes go on
    use(next, kSeldom, 1);
    use(next, kAlways, 1);
    (void)next.finish();
    await_commit(3);
    EXPECT_EQ(engine_->position().tensor_updates,
              (std::map<std::string, std::uint64_t>{{"seldom", 2}}));
  }

  const TempDirectory directory_;
  const Config config_ = config_of(directory_.path());
  const ModelSpec model_ = model_of();
  const std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
  const Stream stream_{*device_, "compute"};
  ReadGate* gate_ = nullptr;
  std::unique_ptr<Engine> engine_{
      new Engine(EngineOverQueue::make(config_, model_, *device_, [this](auto queue) {
        auto gate = std::make_unique<ReadGate>(std::move(queue));
        gate_ = gate.get();
        return gate;
      }))};
};

TEST_F(LeftBlock, IsCommittedThoughASkippedStepStillReadsIt) {
  {
    Step skipped = step_with_held_reads(std::numeric_limits<float>::infinity());
    EXPECT_TRUE(skipped.finish().skipped);
  }
  expect_the_commit_of_the_retry();
}

TEST_F(LeftBlock, IsCommittedThoughAnAbandonedStepStillReadsIt) {
  { const Step abandoned = step_with_held_reads(1); }
  expect_the_commit_of_the_retry();
}

}  // namespace
}  // namespace sluice::test
