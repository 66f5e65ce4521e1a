// Units whose optimizer state is at home on the device: the device updates them with the bits of
// the CPU, nothing of them moves, and what may go wrong there has a name.
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string_view>
#include <thread>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "engine/run/task_thread.h"
#include "tests/support/delays.h"
#include "tests/support/expect_error.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

constexpr OverlapPolicy kClippingPolicies[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                               OverlapPolicy::kEager, OverlapPolicy::kSpeculative};

class DeviceState : public testing::Test {
 protected:
  // On a GPU, as far as the engine can tell.
  ToyResult train(const ToyOptions& options) {
    const std::uint64_t bytes = config_.memory.device_bytes.value_or(64_MiB);
    const auto device = make_host_device({.memory_bytes = bytes, .has_own_memory = is_gpu_});
    const ModelSpec model = toy_model(options.frozen_units);
    Engine engine(config_, model, *device);
    placement_ = placement_of(engine);
    EXPECT_EQ(device->allocated_bytes(), placement_.device_bytes());
    return run_toy(engine, model, *device, config_, options);
  }
  void expect_oracle(const ToyOptions& options) {
    EXPECT_TRUE(same_training(train(options), toy_oracle(config_, options)));
  }
  std::uint64_t smallest_budget() {
    const std::string message =
        expect_error(ErrorCode::kOutOfMemory, [&] { (void)train({.steps = 1}); });
    const std::string before = "the smallest that works is \"";
    const std::size_t begin = message.find(before) + before.size();
    return parse_size(message.substr(begin, message.find('"', begin) - begin));
  }
  std::vector<bool> units_on_device() const {
    const Layout layout(validated(toy_model()), state_format(config_),
                        config_.storage.block_elements);
    std::vector<bool> on_device;
    for (const UnitPlace& unit : layout.units()) {
      on_device.push_back(placement_.is_updated_on_device(unit));
      for (const BlockPlace& block : layout.blocks_of(unit.id))
        EXPECT_EQ(placement_.record_tier[index_of(block.id)] == Tier::kDevice, on_device.back());
    }
    return on_device;
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  bool is_gpu_ = true;
  Placement placement_;
};

TEST_F(DeviceState, EveryOptimizerGivesTheBitsOfTheCpu) {
  config_.placement.optimizer = TierChoice::kDevice;
  for (const OptimizerKind kind :
       {OptimizerKind::kAdamW, OptimizerKind::kAdam, OptimizerKind::kLion, OptimizerKind::kAdagrad,
        OptimizerKind::kSgd}) {
    for (const DType type : {DType::kBf16, DType::kFp32, DType::kFp16}) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(kind), name_of(type)));
      config_.optimizer.kind = kind;
      config_.precision = {.parameters = type, .gradients = type};
      expect_oracle({.steps = 3, .micro_batches = 2});
    }
  }
}

// Whatever the budget has room for, down to nothing but what must be there: the state is what fills
// the room, and no budget changes a bit.
TEST_F(DeviceState, AutoGivesTheDeviceTheFirstUnitsStateAsFarAsItsBudgetGoes) {
  config_.placement.optimizer = TierChoice::kDevice;
  config_.memory.device_bytes = 1_KiB;
  const std::uint64_t enough = smallest_budget();
  config_.placement.optimizer = TierChoice::kAuto;
  std::ptrdiff_t most = 0;
  for (std::uint64_t bytes = 400_KiB; bytes <= enough + 200_KiB; bytes += 200_KiB) {
    for (const OverlapPolicy policy : kClippingPolicies) {
      config_.memory.device_bytes = bytes;
      config_.memory.host_bytes = bytes % 400_KiB == 0 ? 64_MiB : 900_KiB;
      config_.optimizer.overlap = policy;
      config_.optimizer.clip_norm = policy == OverlapPolicy::kEager ? 0 : 160;
      SCOPED_TRACE(fmt::format("{} KiB, {}", bytes >> 10, name_of(policy)));
      expect_oracle({.steps = 3, .micro_batches = 2, .evaluate = true});
      EXPECT_LE(placement_.device_bytes(), bytes);
      const std::vector<bool> on_device = units_on_device();
      const std::ptrdiff_t units = std::ranges::count(on_device, true);
      // The last one has a single element: it fits where others do not.
      EXPECT_TRUE(std::ranges::is_partitioned(on_device.begin(), on_device.end() - 1,
                                              [](bool is_there) { return is_there; }));
      EXPECT_GE(units, most);
      most = units;
    }
  }
  EXPECT_EQ(most, 6) << "all of it in the end";
}

// Memory of the host is worth the same to it, and its cores are faster than one that plays a GPU.
TEST_F(DeviceState, OnTheHostAutoLeavesTheStateToTheCpu) {
  is_gpu_ = false;
  (void)train({.steps = 1});
  EXPECT_EQ(placement_.device_record_bytes, 0u);
  EXPECT_EQ(placement_.tally_bytes, 0u);
}

// All of it in a budget to the byte; one KiB less is an error that says how much it takes.
TEST_F(DeviceState, TheSmallestBudgetNamedIsTheSmallestThatWorks) {
  config_.placement.optimizer = TierChoice::kDevice;
  for (const bool is_gpu : {true, false}) {
    is_gpu_ = is_gpu;
    config_.memory.device_bytes = 1_KiB;
    const std::uint64_t enough = smallest_budget();
    config_.memory.device_bytes = enough - 1_KiB;
    EXPECT_EQ(smallest_budget(), enough);
    config_.memory.device_bytes = enough;
    expect_oracle({.steps = 2});
  }
  const Layout layout(validated(toy_model()), state_format(config_),
                      config_.storage.block_elements);
  std::uint64_t records = 0;
  for (const BlockPlace& block : layout.blocks()) records += layout.record_slot_bytes(block.id);
  EXPECT_EQ(placement_.device_record_bytes, records);
  EXPECT_EQ(placement_.host_record_bytes + placement_.nvme_bytes(), 0u);
  EXPECT_EQ(placement_.gradient_set_bytes + placement_.gradient_staging.size_bytes(), 0u);
  EXPECT_EQ(placement_.lanes.count, 1u);
}

// The host has a tally of each unit, and one lane through which the state is read from outside.
TEST_F(DeviceState, NothingOfAStepMovesToTheHostOrToStorage) {
  config_.placement.optimizer = TierChoice::kDevice;
  trace_enable(1 << 16);
  const ToyResult result = train({.steps = 3, .micro_batches = 2});
  const std::vector<TraceRecord> records = trace_take();
  trace_enable(0);
  for (const StepReport& report : result.reports)
    EXPECT_EQ(report.nvme_read_bytes + report.nvme_write_bytes, 0u);
  EXPECT_EQ(result.predicted.nvme_read_bytes + result.predicted.nvme_write_bytes, 0u);
  const auto count = [&](TraceKind kind, std::uint8_t detail) {
    return std::ranges::count_if(records, [&](const TraceRecord& record) {
      return record.kind == kind && record.detail == detail;
    });
  };
  EXPECT_EQ(count(TraceKind::kCopyToHost, 0) + count(TraceKind::kAdam, 0) +
                count(TraceKind::kAccumulate, 0) + count(TraceKind::kNorm, 0),
            0);
  EXPECT_EQ(count(TraceKind::kOnDevice, kTraceOptimizerState), 3 * 6);  // a unit and step
  EXPECT_EQ(count(TraceKind::kOnDevice, kTraceGradients), 3 * 2 * 7);   // the embedding has two
}

TEST_F(DeviceState, NonFiniteGradientsAreNamedOrSkipped) {
  config_.placement.optimizer = TierChoice::kDevice;
  for (const NonFinitePolicy non_finite : {NonFinitePolicy::kStop, NonFinitePolicy::kSkip}) {
    config_.optimizer.non_finite = non_finite;
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    const ModelSpec model = toy_model();
    Engine engine(config_, model, *device);
    engine.initialize(toy_values());
    const StateBytes before = read_state(engine);
    const Stream stream(*device, "compute");
    Step step = engine.begin_step({.learning_rate = 1e-2});
    for (const UnitId unit : validated(model).forward_order)
      (void)step.acquire(unit, Pass::kForward, stream);
    for (const UnitId unit : validated(model).backward_order) {
      const Lease lease = step.acquire(unit, Pass::kBackward, stream);
      if (unit != UnitId{3}) continue;
      auto* gradient = reinterpret_cast<std::uint16_t*>(lease.gradient(1));
      device->launch(stream.id(), [gradient] {
        gradient[9'001] = 0x7f80;
        gradient[9'002] = 0x7fc0;
      });
    }
    if (non_finite == NonFinitePolicy::kSkip) {
      EXPECT_TRUE(step.finish().skipped);
    } else {
      const std::string message = expect_error(ErrorCode::kNonFinite, [&] { (void)step.finish(); });
      EXPECT_NE(message.find("\"h.2.fc\" (unit \"h.2\") is not finite at element 9001"),
                std::string::npos)
          << message;
      continue;
    }
    EXPECT_TRUE(read_state(engine) == before);
  }
}

// A unit that backward leaves out has a gradient of zeros, which replaces the one before; one that
// comes back has another norm. Where devices are slow, not before the update has read the old one.
TEST_F(DeviceState, ChangedSchedulesGiveTheOraclesBits) {
  const ToyOptions options{.steps = 5, .change = [](std::uint64_t step, ToyUses& uses) {
                             // All except the first: their update is still to come when nothing
                             // needs anything but it.
                             const auto leave_out = [&](std::uint32_t first, std::uint32_t last) {
                               std::erase_if(uses, [=](const ToyUse& use) {
                                 return index_of(use.unit) >= first && index_of(use.unit) <= last;
                               });
                             };
                             if (step == 2) leave_out(1, 5);
                             if (step == 4) leave_out(0, 0);
                             for (std::uint64_t again = 0; step == 3 && again < 3; ++again)
                               uses.push_back({UnitId{static_cast<std::uint32_t>(again % 2)},
                                               Pass::kBackward, 500 + again});
                           }};
  const ToyResult expected = toy_oracle(config_, options);
  for (const OverlapPolicy policy : {OverlapPolicy::kSerial, OverlapPolicy::kDeferred}) {
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
      config_.optimizer.overlap = policy;
      config_.memory.device_bytes = seed % 2 == 0 ? 64_MiB : 1300_KiB;
      const auto device = make_delayed_device(
          make_host_device({.memory_bytes = *config_.memory.device_bytes, .has_own_memory = true}),
          seed, seed < 4 ? 300 : 3000);
      const TaskDelays delays(seed, 1000);
      const Watchdog watchdog(std::chrono::seconds(60), "changed schedules");
      const ModelSpec model = toy_model();
      Engine engine(config_, model, *device);
      EXPECT_TRUE(same_training(run_toy(engine, model, *device, config_, options), expected))
          << name_of(policy) << ", seed " << seed;
    }
  }
}

void delay_the_worker() {
  char name[16] = {};
  (void)pthread_getname_np(pthread_self(), name, sizeof(name));
  if (std::string_view(name) == "sluice-work")
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// A unit that is used again while its norm is being taken has it taken once more.
TEST_F(DeviceState, ANormThatIsOvertakenIsTakenAgain) {
  config_.placement.optimizer = TierChoice::kDevice;
  const ToyOptions options{.steps = 3, .change = [](std::uint64_t step, ToyUses& uses) {
                             for (std::uint64_t again = 0; step == 2 && again < 4; ++again)
                               uses.push_back({UnitId{0}, Pass::kBackward, 500 + again});
                           }};
  const Watchdog watchdog(std::chrono::seconds(60), "a norm that is overtaken");
  TaskThread::set_before_task(delay_the_worker);
  expect_oracle(options);
  TaskThread::set_before_task(nullptr);
}

// Steps that are given up leave nothing behind: gradients and norms are those of the next one.
TEST_F(DeviceState, AnAbandonedStepChangesNothing) {
  config_.placement.optimizer = TierChoice::kDevice;
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  const ModelSpec model = toy_model();
  Engine engine(config_, model, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  for (const bool is_finished : {true, false, true, false, false, true}) {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    walk_step(step, model, engine, *device, stream, config_, 1);
    if (is_finished) (void)step.finish();
  }
  EXPECT_TRUE(read_state(engine) == toy_oracle(config_, {.steps = 3}).state);
}

// A weight that overflows leaves the state between two steps, and every later call says so.
TEST_F(DeviceState, AnEngineWhoseWeightsHaveOverflownRefusesToGoOn) {
  config_.placement.optimizer = TierChoice::kDevice;
  for (const OverlapPolicy policy : kClippingPolicies) {
    config_.optimizer.overlap = policy;
    config_.optimizer.clip_norm = 0;
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    const ModelSpec model = toy_model();
    Engine engine(config_, model, *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    const std::string message = expect_error(ErrorCode::kNonFinite, [&] {
      Step step = engine.begin_step({.learning_rate = 3e38});
      walk_step(step, model, engine, *device, stream, config_, 1);
      (void)step.finish();
      engine.drain();
    });
    EXPECT_NE(message.find("overflow in step 1"), std::string::npos) << message;
    EXPECT_THROW(engine.drain(), Error);  // with the same words, where the first was finish()
    (void)expect_error(ErrorCode::kPoisoned, [&] { (void)read_state(engine); });
  }
}

// A job goes on wherever the state of it is read back from, as when a saved one is taken up.
TEST_F(DeviceState, StateIsReadFromWhereItIs) {
  config_.placement.optimizer = TierChoice::kDevice;
  const StateBytes on_device = train({.steps = 2, .frozen_units = {2}}).state;
  config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
  EXPECT_TRUE(train({.steps = 2, .frozen_units = {2}}).state == on_device);
}

}  // namespace
}  // namespace sluice::test
