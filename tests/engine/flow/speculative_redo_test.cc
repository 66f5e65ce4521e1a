// A tentative update that clipping overrules while it is being written: the next forward does not
// see what it made.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "engine/plan/layout.h"
#include "io/io_queue.h"
#include "tests/support/delays.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

// Counts writes. Once armed, holds the next one until it is let go.
class HeldWrites final : public IoQueue {
 public:
  explicit HeldWrites(std::unique_ptr<IoQueue> real) : real_(std::move(real)) {}

  std::uint64_t submitted() const {
    const std::scoped_lock lock(mutex_);
    return submitted_;
  }
  void arm() {
    const std::scoped_lock lock(mutex_);
    is_armed_ = true;
  }
  bool holds_one() const {
    const std::scoped_lock lock(mutex_);
    return held_ != nullptr;
  }
  void let_go() {
    IoRequest* held = nullptr;
    {
      const std::scoped_lock lock(mutex_);
      is_armed_ = false;
      held = std::exchange(held_, nullptr);
    }
    if (held != nullptr) real_->submit(std::span(&held, 1));
  }

  void submit(std::span<IoRequest* const> requests) override {
    std::vector<IoRequest*> passed;
    {
      const std::scoped_lock lock(mutex_);
      for (IoRequest* const request : requests) {
        const bool is_write = request->kind == IoKind::kWrite;
        submitted_ += is_write ? 1 : 0;
        if (is_write && std::exchange(is_armed_, false))
          held_ = request;
        else
          passed.push_back(request);
      }
    }
    real_->submit(passed);
  }
  void wait_idle() override {
    let_go();
    real_->wait_idle();
  }
  IoCounters counters() const override { return real_->counters(); }
  std::string_view name() const override { return "held writes"; }

 private:
  const std::unique_ptr<IoQueue> real_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::uint64_t submitted_ = 0;
  bool is_armed_ = false;
  IoRequest* held_ = nullptr;
};

// The parameters of the model, as forward finds them on the device.
std::vector<std::byte> forward_of(Step& step, const Engine& engine, const ModelSpec& model,
                                  HostDevice& device) {
  const Stream stream(device, "compute");
  std::vector<std::byte> found;
  for (const UnitId unit : model.forward_order) {
    const Lease lease = step.acquire(unit, Pass::kForward, stream);
    const auto tensors = layout_of(engine).tensors_of(unit);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::size_t begin = found.size();
      found.resize(begin + tensors[i].element_count * layout_of(engine).format().parameter_bytes());
      device.launch(stream.id(), [&found, begin, parameters = lease.parameter(i)] {
        std::memcpy(found.data() + begin, parameters, found.size() - begin);
      });
      device.synchronize(stream.id());
    }
  }
  return found;
}

std::vector<std::byte> parameters_of(Engine& engine, const ModelSpec& model) {
  std::vector<std::byte> all;
  for (const UnitId unit : model.forward_order) {
    for (const TensorPlace& tensor : layout_of(engine).tensors_of(unit)) {
      const std::size_t begin = all.size();
      all.resize(begin + tensor.element_count * layout_of(engine).format().parameter_bytes());
      engine.read_state(tensor.id, StateKind::kParameter, 0, std::span(all).subspan(begin));
    }
  }
  return all;
}

TEST(SpeculativeRedo, ForwardDoesNotSeeWhatClippingOverrules) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.optimizer.overlap = OverlapPolicy::kSpeculative;
  config.optimizer.clip_norm = 1e-3;
  const ModelSpec model = validated(toy_model());
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  HeldWrites* writes = nullptr;
  Engine engine = EngineOverQueue::make(config, model, *device, [&](auto queue) {
    auto wrapped = std::make_unique<HeldWrites>(std::move(queue));
    writes = wrapped.get();
    return wrapped;
  });
  engine.initialize(toy_values());
  // All but the last use: every block but those of the first unit is written, into its shadow.
  ToyUses uses;
  for (const UnitId unit : model.forward_order) uses.push_back({unit, Pass::kForward, uses.size()});
  for (const UnitId unit : model.backward_order)
    uses.push_back({unit, Pass::kBackward, uses.size()});
  const ToyUses last{uses.back()};
  uses.pop_back();
  ASSERT_EQ(last[0].unit, model.forward_order[0]);
  const std::uint64_t planes =
      2 * (layout_of(engine).blocks().size() - layout_of(engine).blocks_of(last[0].unit).size());
  const Watchdog watchdog(std::chrono::seconds(60), "tentative updates are not written");
  const auto until = [](const auto& condition) {
    while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  {
    const Stream stream(*device, "compute");
    const std::uint64_t before = writes->submitted();
    Step step = engine.begin_step({.learning_rate = 1e-2});
    walk_step(step, uses, engine, *device, stream, config);
    until([&] { return writes->submitted() == before + planes; });
    writes->arm();
    walk_step(step, last, engine, *device, stream, config);
    until([&] { return writes->holds_one(); });
    EXPECT_LT(step.finish().clip_factor, 1);
  }
  std::vector<std::byte> seen;
  {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    // Until then, forward has no right parameters to see.
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      writes->let_go();
    });
    seen = forward_of(step, engine, model, *device);
    other.join();
  }
  engine.drain();
  EXPECT_TRUE(seen == parameters_of(engine, model));
  EXPECT_TRUE(read_state(engine) == toy_oracle(config, {.steps = 1}).state);
}

}  // namespace
}  // namespace sluice::test
