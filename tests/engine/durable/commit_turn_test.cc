// The commit of a step waits for the fetches of the next one, and for nothing else.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <sluice/units.h>
#include "engine/engine_over_queue.h"
#include "tests/support/expect_error.h"
#include "tests/support/hang_guard.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_computation.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

// Keeps writes waiting while it is closed. Flushes take a time of their own instead of the drive's.
class GateQueue final : public IoQueue {
 public:
  explicit GateQueue(std::unique_ptr<IoQueue> inner) : inner_(std::move(inner)) {}
  ~GateQueue() override {
    open();
    flushing_.clear();  // ends them
  }

  void submit(std::span<IoRequest* const> requests) override {
    for (IoRequest* const request : requests) {
      const std::scoped_lock lock(mutex_);
      if (request->kind == IoKind::kFlush) {
        ++flushes_;
        // At once: on a busy machine a thread may begin so late that the engine takes the flush for
        // a slow one.
        if (flush_time_.count() == 0) {
          request->on_complete(*request);
          continue;
        }
        flushing_.emplace_back([request, time = flush_time_] {
          std::this_thread::sleep_for(time);
          request->on_complete(*request);
        });
        continue;
      }
      if (request->kind == IoKind::kRead && reads_fail_) {
        request->error = EIO;
        request->on_complete(*request);
        continue;
      }
      if (request->kind == IoKind::kWrite && is_closed_)
        held_.push_back(request);
      else
        inner_->submit({&request, 1});
    }
  }
  void wait_idle() override {
    open();
    std::vector<std::jthread> flushing;
    {
      const std::scoped_lock lock(mutex_);
      flushing.swap(flushing_);
    }
    flushing.clear();
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
  int flushes() const { return flushes_; }
  std::uint64_t write_requests() const { return inner_->counters().write_requests; }
  void set_flush_time(std::chrono::milliseconds time) {
    const std::scoped_lock lock(mutex_);
    flush_time_ = time;
  }
  void fail_reads() {
    const std::scoped_lock lock(mutex_);
    reads_fail_ = true;
  }

 private:
  std::unique_ptr<IoQueue> inner_;
  std::atomic<int> flushes_ = 0;
  std::mutex mutex_;
  bool is_closed_ = false;  // guarded by mutex_, as all below
  bool reads_fail_ = false;
  std::chrono::milliseconds flush_time_{0};
  std::vector<std::jthread> flushing_;
  std::vector<IoRequest*> held_;
};

class CommitTurn : public testing::TestWithParam<OverlapPolicy> {
 protected:
  CommitTurn() { (void)engine_->open_or_create(toy_values()); }

  static Config config_of(const std::string& path) {
    Config config = toy_config(path);
    config.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config.memory.device_bytes = 300_KiB;  // not all units at once
    config.memory.host_bytes = 1_MiB;      // nor all blocks
    config.storage.state.name = "run-7";
    config.optimizer.overlap = GetParam();
    config.optimizer.clip_norm = 0;
    return config;
  }
  Step begin() { return engine_->begin_step({.learning_rate = 1e-2}); }
  void walk(Step& step, Pass pass, std::size_t count_max = SIZE_MAX) {
    ToyUses uses = planned_uses(model_, 1, MicroBatchOrder::kHorizontal);
    std::erase_if(uses, [&](const ToyUse& use) { return use.pass != pass; });
    uses.resize(std::min(uses.size(), count_max));
    walk_step(step, uses, *engine_, *device_, stream_, config_);
  }
  // A whole step, whose stores wait until the gate is open.
  void step() {
    gate_->close();
    Step step = begin();
    walk(step, Pass::kForward);
    walk(step, Pass::kBackward);
    (void)step.finish();
  }
  // Long enough for a flush that does not wait.
  void expect_no_flush() const {
    const int before = gate_->flushes();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_EQ(gate_->flushes(), before);
  }
  void await_commit(std::uint64_t step) const {
    const HangGuard guard("a commit that waits for too much");
    while (engine_->committed_step() != step)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  const TempDirectory directory_;
  const Config config_ = config_of(directory_.path());
  const ModelSpec model_ = validated(toy_model());
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
  const Stream stream_{*device_, "compute"};
  GateQueue* gate_ = nullptr;
  std::unique_ptr<Engine> engine_{
      new Engine(EngineOverQueue::make(config_, model_, *device_, [this](auto queue) {
        auto gate = std::make_unique<GateQueue>(std::move(queue));
        gate_ = gate.get();
        return gate;
      }))};
};

// A flush makes reads wait. Where updates begin in backward, their stores need the commit, so it
// waits for the fetches of forward alone.
TEST_P(CommitTurn, ComesWhenTheNextStepHasItsUnits) {
  step();
  Step next = begin();
  gate_->open();
  expect_no_flush();
  walk(next, Pass::kForward);
  if (GetParam() == OverlapPolicy::kDeferred) {
    expect_no_flush();
    walk(next, Pass::kBackward);
    await_commit(1);
  } else {
    await_commit(1);
    walk(next, Pass::kBackward);
  }
  (void)next.finish();
  await_commit(2);  // no step is active
}

TEST_P(CommitTurn, ComesWhenTheNextStepIsAbandoned) {
  step();
  {
    const Step abandoned = begin();
    gate_->open();
    expect_no_flush();
  }
  await_commit(1);
}

// The rest of the step would be too short for such flushes, and the stores would wait for them.
TEST_P(CommitTurn, ComesAtOnceWhereFlushesAreSlowByThemselves) {
  gate_->set_flush_time(std::chrono::seconds(1));  // a step may take 9 s on a busy machine
  step();
  gate_->open();
  await_commit(1);
  step();  // with a commit beside it, whose flushes are most of the time between two steps
  const Step next = begin();
  gate_->open();
  await_commit(2);
}

// The uses that the schedule still expects do not come.
TEST_P(CommitTurn, ComesWhenTheNextStepEndsEarly) {
  if (GetParam() == OverlapPolicy::kEager) GTEST_SKIP() << "its turn comes in forward";
  step();
  Step next = begin();
  gate_->open();
  walk(next, Pass::kForward);
  walk(next, Pass::kBackward, /*count_max=*/1);
  (void)next.finish();
  await_commit(2);
}

// The commit that waits would name a block that cannot be read back. The commit before does not.
TEST_P(CommitTurn, DoesNotComeWhenABlockCannotBeReadBack) {
  if (GetParam() == OverlapPolicy::kDeferred) GTEST_SKIP() << "all is read ahead by then";
  const std::uint64_t made = gate_->write_requests();
  step();
  gate_->open();
  await_commit(1);
  const std::uint64_t of_step = gate_->write_requests() - made;
  step();
  {
    Step next = begin();
    gate_->open();
    const HangGuard guard("stores that do not come");
    constexpr std::uint64_t kRecords = 2;  // twins, which the commit writes
    while (gate_->write_requests() < made + 2 * of_step - kRecords)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    expect_no_flush();
    gate_->fail_reads();
    (void)expect_error(ErrorCode::kIo, [&] {
      walk(next, Pass::kForward);
      walk(next, Pass::kBackward);
    });
  }
  engine_.reset();
  Engine again(config_, model_, *device_);
  EXPECT_EQ(again.open_or_create(toy_values()).step, 1u);
}

INSTANTIATE_TEST_SUITE_P(, CommitTurn,
                         testing::Values(OverlapPolicy::kDeferred, OverlapPolicy::kEager),
                         [](const auto& value) { return std::string(name_of(value.param)); });

}  // namespace
}  // namespace sluice::test
