// The places where computation computes gradients: they are zero, or, if computation overwrites
// gradients, no bit of the training depends on them.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "engine/plan/layout.h"
#include "tests/support/expect_error.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

class GradientZerosTest : public testing::Test {
 protected:
  GradientZerosTest() {
    config_.placement = {TierChoice::kHost, TierChoice::kHost};
    config_.optimizer.overlap = OverlapPolicy::kDeferred;
    config_.optimizer.clip_norm = 0.5;  // so that every bit of the norm counts
  }

  ToyResult train(ModelSpec model, bool overwrites, const ToyOptions& options) const {
    model.overwrites_gradients = overwrites;
    const auto device = make_host_device({.memory_bytes = 4_MiB});
    Engine engine(config_, model, *device);
    return run_toy(engine, model, *device, config_, options);
  }

  // A step with one backward use of each unit. `fill` gets the gradient of the unit's only tensor.
  using Fill = std::function<void(std::byte* gradient, std::uint64_t size_bytes)>;
  StepReport walk(Engine& engine, HostDevice& device, const Stream& stream,
                  const Fill& fill) const {
    Step step = engine.begin_step({.learning_rate = 1e-3});
    const auto units = static_cast<std::uint32_t>(engine.tensors().size());
    for (std::uint32_t unit = 0; unit < units; ++unit)
      (void)step.acquire(UnitId{unit}, Pass::kForward, stream);
    for (std::uint32_t unit = units; unit-- > 0;) {
      const Lease lease = step.acquire(UnitId{unit}, Pass::kBackward, stream);
      device.synchronize(stream.id());
      fill(lease.gradient(0), 2 * engine.tensors()[unit].element_count);
    }
    return step.finish();
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
};

// Units of other lengths, so that one's padding lies where another has elements.
ModelSpec uneven_model(bool overwrites) {
  ModelSpec model;
  for (const std::uint64_t elements : {1000, 5001, 300, 4096})
    model.units.push_back({.name = std::to_string(elements),
                           .tensors = {{.name = std::to_string(elements), .shape = {elements}}}});
  model.overwrites_gradients = overwrites;
  return model;
}

// With the guard, tensors are NaN where nothing is written; and padding counts in the norm.
TEST_F(GradientZerosTest, AreNotNeededWhereEverythingIsOverwritten) {
  using enum OverlapPolicy;
  for (const UnifiedMemory unified : {UnifiedMemory::kAuto, UnifiedMemory::kOff}) {
    for (const TierChoice tier : {TierChoice::kHost, TierChoice::kDevice, TierChoice::kNvme}) {
      for (const OverlapPolicy policy : {kSerial, kDeferred, kEager, kSpeculative}) {
        if (tier != TierChoice::kHost && policy != kDeferred) continue;
        for (const GuardMode guard : {GuardMode::kOff, GuardMode::kOn}) {
          SCOPED_TRACE(fmt::format("unified {}, gradients in {}, {}, guard {}", name_of(unified),
                                   name_of(tier), name_of(policy), name_of(guard)));
          config_.memory.unified = unified;
          config_.memory.guard = guard;
          config_.placement.gradients = tier;
          config_.optimizer.overlap = policy;
          config_.optimizer.clip_norm = policy == kEager ? 0 : 0.5;
          for (const ToyOptions& options :
               {ToyOptions{.steps = 3}, ToyOptions{.steps = 2, .micro_batches = 3, .leases = 2}}) {
            const ModelSpec model = toy_model({}, options.leases);
            const ToyResult result = train(model, /*overwrites=*/true, options);
            EXPECT_TRUE(same_training(result, toy_oracle(config_, options)));
            const ToyResult zeroed = train(model, /*overwrites=*/false, options);
            for (std::size_t i = 0; i < zeroed.reports.size(); ++i)
              EXPECT_EQ(result.reports[i].gradient_norm, zeroed.reports[i].gradient_norm);
          }
        }
      }
    }
  }
}

// One slot for all units, or each unit's place in the set: an application that adds to its
// gradients finds zeros at every use.
TEST_F(GradientZerosTest, AreThereForApplicationsThatAdd) {
  for (const UnifiedMemory unified : {UnifiedMemory::kAuto, UnifiedMemory::kOff}) {
    config_.memory.unified = unified;
    const auto device = make_host_device({.memory_bytes = 1_MiB});
    Engine engine(config_, uneven_model(/*overwrites=*/false), *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    for (int i = 0; i < 3; ++i) {
      walk(engine, *device, stream, [&](std::byte* gradient, std::uint64_t size_bytes) {
        EXPECT_EQ(std::count(gradient, gradient + size_bytes, std::byte{}),
                  static_cast<std::ptrdiff_t>(size_bytes))
            << name_of(unified) << ", step " << i;
        std::memset(gradient, 0x3f, size_bytes);
      });
    }
    engine.close();
  }
}

// A slot that was another unit's has that unit's gradient where this one has padding.
TEST_F(GradientZerosTest, FillThePaddingOfASlotOfAnotherUnit) {
  config_.memory.unified = UnifiedMemory::kOff;
  double norms[2] = {};
  for (const bool overwrites : {false, true}) {
    const auto device = make_host_device({.memory_bytes = 1_MiB});
    Engine engine(config_, uneven_model(overwrites), *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    for (int i = 0; i < 3; ++i)
      norms[overwrites ? 1 : 0] =
          walk(engine, *device, stream, [](std::byte* gradient, std::uint64_t size_bytes) {
            std::memset(gradient, 0x3f, size_bytes);
          }).gradient_norm;
    engine.close();
  }
  EXPECT_EQ(norms[1], norms[0]);
}

// With memory.guard, an element that computation leaves out is no number.
TEST_F(GradientZerosTest, AnElementThatIsLeftOutShowsWithTheGuard) {
  config_.memory.guard = GuardMode::kOn;
  for (const UnifiedMemory unified : {UnifiedMemory::kAuto, UnifiedMemory::kOff}) {
    config_.memory.unified = unified;
    const auto device = make_host_device({.memory_bytes = 1_MiB});
    Engine engine(config_, uneven_model(/*overwrites=*/true), *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    const std::string message = expect_error(ErrorCode::kNonFinite, [&] {
      walk(engine, *device, stream, [](std::byte* gradient, std::uint64_t size_bytes) {
        std::memset(gradient, 0x3f, size_bytes == 600 ? 598 : size_bytes);
      });
    });
    EXPECT_NE(message.find("\"300\" (unit \"300\") is not finite at element 299"),
              std::string::npos)
        << message;
  }
}

// 0 + -0 is 0. The first gradient is copied or computed in place, so its zeros keep their signs.
TEST_F(GradientZerosTest, KeepTheSignsOfAGradientsOwnZeros) {
  config_.memory.guard = GuardMode::kOff;  // the test looks at memory after its lease
  config_.memory.unified = UnifiedMemory::kAuto;
  constexpr std::uint16_t kMinusZero = 0x8000;
  for (const bool overwrites : {false, true}) {
    const auto device = make_host_device({.memory_bytes = 1_MiB});
    Engine engine(config_, uneven_model(overwrites), *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    std::vector<std::uint16_t> seen(300);
    const std::byte* in_set = nullptr;
    walk(engine, *device, stream, [&](std::byte* gradient, std::uint64_t size_bytes) {
      const std::vector<std::uint16_t> zeros(size_bytes / 2, kMinusZero);
      std::memcpy(gradient, zeros.data(), size_bytes);
      if (size_bytes == 600) in_set = gradient;
    });
    engine.drain();
    std::memcpy(seen.data(), in_set, 600);
    EXPECT_EQ(seen, std::vector<std::uint16_t>(300, kMinusZero)) << overwrites;
    engine.close();
  }
}

// The norm of a sum of several gradients is taken while the last one is added.
TEST_F(GradientZerosTest, SumsAreReadOnce) {
  const Layout layout(validated(toy_model()), state_format(config_),
                      config_.storage.block_elements);
  for (const std::uint32_t micro_batches : {1u, 2u, 3u}) {
    std::uint64_t added_bytes = 0, normed_bytes = 0;
    for (const UnitPlace& unit : layout.units()) {
      const std::uint32_t gradients = micro_batches * (unit.name == "embedding" ? 2 : 1);
      added_bytes += (std::max(gradients, 2u) - 2) * layout.set_gradient_bytes(unit.id);
      normed_bytes += layout.set_gradient_bytes(unit.id);
    }
    trace_enable(1 << 16);
    const ToyOptions options{.steps = 1, .micro_batches = micro_batches};
    EXPECT_TRUE(same_training(train(toy_model(), false, options), toy_oracle(config_, options)));
    for (const TraceRecord& record : trace_take()) {
      if (record.kind == TraceKind::kAccumulate) added_bytes -= record.size_bytes;
      if (record.kind == TraceKind::kNorm) normed_bytes -= record.size_bytes;
    }
    trace_enable(0);
    EXPECT_EQ(added_bytes, 0u) << micro_batches;
    EXPECT_EQ(normed_bytes, 0u) << micro_batches;
  }
}

// By the schedule, the second gradient is the last one, and the sum's norm is taken while it is
// added. But a third one waits behind it.
TEST_F(GradientZerosTest, ANormIsNotThatOfAnEarlierSum) {
  ModelSpec model;
  model.units = {{.name = "a", .tensors = {{.name = "a", .shape = {1000}}}}};
  model.concurrent_leases = 2;  // so that there are slots for both
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  Engine engine(config_, model, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  Step step = engine.begin_step({.learning_rate = 1e-3, .micro_batches = 2});
  const auto add_ones = [&](std::chrono::milliseconds delay) {
    const Lease lease = step.acquire(UnitId{0}, Pass::kBackward, stream);
    device->launch(stream.id(), [gradient = lease.gradient<Bf16>(0), delay] {
      std::this_thread::sleep_for(delay);
      std::fill_n(gradient, 1000, Bf16{0x3f80});
    });
  };
  (void)step.acquire(UnitId{0}, Pass::kForward, stream);
  add_ones({});
  (void)step.acquire(UnitId{0}, Pass::kForward, stream);
  add_ones(std::chrono::milliseconds(200));
  add_ones({});
  EXPECT_DOUBLE_EQ(step.finish().gradient_norm, std::sqrt(1000 * 9.0) / 2);
  engine.close();
}

}  // namespace
}  // namespace sluice::test
