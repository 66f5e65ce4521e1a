// Engines and queues that come apart while transfers are in flight. The sanitizers have to be
// silent, and it has to end.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "engine/engine_over_queue.h"
#include "engine/run/wait_limit.h"
#include "engine/store/storage_queue.h"
#include "io/direct_file.h"
#include "tests/support/campaign.h"
#include "tests/support/fault_queue.h"
#include "tests/support/request_batch.h"
#include "tests/support/side_by_side.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

TEST(Shutdown, EngineWithTransfersInFlight) {
  const TempDirectory directory;
  const ModelSpec model = validated(toy_model());
  side_by_side(seeds_of(campaign(60)), [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Config config = toy_config(directory.path());
    config.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config.memory.host_bytes = 1_MiB;
    config.storage.backend = seed % 2 == 0 ? IoBackend::kAuto : IoBackend::kThreads;
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    const auto engine = std::unique_ptr<Engine>(new Engine(EngineOverQueue::make(
        config, model, *device, [&](std::unique_ptr<IoQueue> queue) -> std::unique_ptr<IoQueue> {
          if (random() % 2 == 0) return queue;
          return make_fault_queue(std::move(queue), {.seed = seed, .delay_us_max = 100});
        })));
    engine->initialize(toy_values());
    const Stream stream(*device, "compute");
    // The prefetcher runs ahead from begin_step() on; the walk ends anywhere.
    Step step = engine->begin_step({.learning_rate = 1e-2});
    const std::size_t uses = random() % model.forward_order.size();
    for (std::size_t use = 0; use < uses; ++use)
      (void)step.acquire(model.forward_order[use], Pass::kForward, stream);
  });
}

// Once armed, holds submitted operations until the queue is waited for.
class HoldingQueue : public IoQueue {
 public:
  explicit HoldingQueue(std::unique_ptr<IoQueue> real) : real_(std::move(real)) {}

  void arm() { is_armed_ = true; }
  std::size_t held() const {
    const std::scoped_lock lock(mutex_);
    return held_.size();
  }

  void submit(std::span<IoRequest* const> requests) override {
    {
      const std::scoped_lock lock(mutex_);
      if (is_armed_) {
        held_.insert(held_.end(), requests.begin(), requests.end());
        return;
      }
    }
    real_->submit(requests);
  }
  void wait_idle() override {
    std::vector<IoRequest*> held;
    {
      const std::scoped_lock lock(mutex_);
      is_armed_ = false;
      held.swap(held_);
    }
    real_->submit(held);
    real_->wait_idle();
  }
  IoCounters counters() const override { return real_->counters(); }
  std::string_view name() const override { return "holding"; }

 private:
  std::unique_ptr<IoQueue> real_;
  std::atomic<bool> is_armed_ = false;
  mutable std::mutex mutex_;
  std::vector<IoRequest*> held_;  // guarded by mutex_
};

// Lanes read ahead as far as there are lanes: records and parameters of 64 blocks.
TEST(Shutdown, EngineWithAHundredTransfersInFlight) {
  const TempDirectory directory;
  ModelSpec model;
  model.units.push_back({"only", {{.name = "weight", .shape = {64, 4096}}}});
  side_by_side(seeds_of(campaign(60)), [&](std::uint64_t seed) {
    Config config = toy_config(directory.path());
    config.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config.optimizer.overlap = OverlapPolicy::kDeferred;
    config.optimizer.lanes = 64;
    config.storage.backend = seed % 2 == 0 ? IoBackend::kAuto : IoBackend::kThreads;
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    HoldingQueue* holding = nullptr;
    auto engine = std::unique_ptr<Engine>(new Engine(EngineOverQueue::make(
        config, model, *device, [&](std::unique_ptr<IoQueue> queue) -> std::unique_ptr<IoQueue> {
          auto wrapped = std::make_unique<HoldingQueue>(std::move(queue));
          holding = wrapped.get();
          return wrapped;
        })));
    engine->initialize(toy_values());
    holding->arm();
    auto step = std::make_unique<Step>(engine->begin_step({.learning_rate = 1e-2}));
    while (holding->held() < 100) std::this_thread::yield();
    // A step waits for its reads when it is abandoned, so they are let go beside it.
    std::thread let_go([&] { holding->wait_idle(); });
    step.reset();
    let_go.join();
    engine.reset();
  });
}

// While the drive does not answer, the application waits in pieces. It then ends the pass, as after
// a signal, or goes on waiting. Training has the same bits as without that.
TEST(Shutdown, WaitsThatTheApplicationEndsOrContinues) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.device_bytes = 128_KiB;  // the window cannot keep all units for the next pass
  const ModelSpec model = toy_model();
  const ToyOptions options{.steps = 3};
  const auto device = make_host_device({.memory_bytes = 128_KiB});
  HoldingQueue* holding = nullptr;
  Engine engine = EngineOverQueue::make(
      config, model, *device, [&](std::unique_ptr<IoQueue> queue) -> std::unique_ptr<IoQueue> {
        auto wrapped = std::make_unique<HoldingQueue>(std::move(queue));
        holding = wrapped.get();
        return wrapped;
      });
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  for (std::uint64_t number = 1; number <= options.steps; ++number) {
    for (const bool is_inference : {false, true}) {
      engine.drain();
      holding->arm();
      std::optional<Step> step;
      std::optional<Inference> inference;
      if (is_inference) {
        inference.emplace(engine.begin_inference());
      } else {
        step.emplace(engine.begin_step({.learning_rate = 1e-2}));
      }
      const auto acquire = [&](std::uint32_t unit) {
        return is_inference ? inference->acquire(UnitId{unit}, stream)
                            : step->acquire(UnitId{unit}, Pass::kForward, stream);
      };
      // The window has kept some units of the pass before.
      std::uint32_t unit = 0;
      int ended = 0;
      while (ended < 3 && unit < model.units.size()) {
        const WaitLimit limit{std::chrono::milliseconds(20)};
        try {
          (void)acquire(unit);
          ++unit;
        } catch (const WaitEnded&) {
          ++ended;
        }
      }
      EXPECT_EQ(ended, 3);
      // A pass waits for its reads when it is abandoned, so they are let go beside it.
      std::thread let_go([&] { holding->wait_idle(); });
      if (number % 2 == 0 && ended == 3) (void)acquire(unit);
      step.reset();
      inference.reset();
      let_go.join();
    }
    Step step = engine.begin_step({.learning_rate = 1e-2});
    walk_step(step, model, engine, *device, stream, config, 1);
    EXPECT_EQ(step.finish().step, number);
  }
  EXPECT_TRUE(read_state(engine) == toy_oracle(config, options).state);
}

// A hundred requests and more, each kind of queue, over two drives.
TEST(Shutdown, QueueWithAHundredRequestsInFlight) {
  constexpr std::size_t kRequests = 128;
  const TempDirectory directory;
  const DirectFile files[] = {DirectFile::create_scratch(directory.path(), kRequests * 16_KiB),
                              DirectFile::create_scratch(directory.path(), kRequests * 16_KiB)};
  const int descriptors[] = {files[0].descriptor(), files[1].descriptor()};
  AlignedBuffer arena(kRequests * 16_KiB, "test");
  for (const std::uint64_t seed : seeds_of(campaign(60))) {
    Config::Storage storage;
    storage.backend = seed % 2 == 0 ? IoBackend::kAuto : IoBackend::kThreads;
    storage.queue_depth = static_cast<std::uint32_t>(1 + 13 * seed % kRequests);
    std::string note;
    RequestBatch batch(kRequests);
    for (std::size_t r = 0; r < kRequests; ++r) {
      batch.set(r, (seed + r) % 3 == 0 ? IoKind::kRead : IoKind::kWrite, descriptors[r % 2],
                r * 16_KiB, arena.span().subspan(r * 16_KiB, 16_KiB));
      batch[r].drive = r % 2;
    }
    {
      const auto queue = open_io_queue(
          storage, {.transfers_max = kRequests, .memory = arena.span(), .files = descriptors},
          note);
      queue->submit(batch.pointers());
    }
    EXPECT_EQ(batch.completion_count(), kRequests);
    for (std::size_t r = 0; r < kRequests; ++r) EXPECT_EQ(batch[r].error, 0);
  }
}

}  // namespace
}  // namespace sluice::test
