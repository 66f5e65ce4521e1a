// Inferences over several batches: units of the next batch come while computation is busy with this
// one, units that stay come once, and the number of batches is learned.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "engine/step/schedule_cursor.h"
#include "tests/support/delays.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kLarge = 32768;
constexpr std::uint64_t kSmall = 4096;

// Two large units, with another one between them.
ModelSpec three_units(std::uint64_t middle = kSmall) {
  ModelSpec model;
  for (const std::uint64_t elements : {kLarge, middle, kLarge}) {
    const std::string name = std::to_string(model.units.size());
    model.units.push_back({name, {{.name = name + ".w", .shape = {elements}}}});
  }
  return model;
}

class InferenceTest : public testing::Test {
 protected:
  InferenceTest() {
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config_.memory.host_bytes = 4_MiB;
    config_.optimizer.overlap = OverlapPolicy::kSerial;  // keeps no unit in a slot
    config_.storage.block_elements = kLarge;
  }

  // Reads since the last call, by unit.
  std::vector<std::size_t> reads() {
    for (const TraceRecord& record : trace_take()) {
      if (record.kind == TraceKind::kRead) ++reads_.at(record.unit);
    }
    return reads_;
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  std::vector<std::size_t> reads_ = std::vector<std::size_t>(3);
};

TEST_F(InferenceTest, TheNextBatchIsReadWhileTheLastUnitOfThisOneIsLeased) {
  config_.memory.device_bytes = 270_KiB;
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  Engine engine(config_, three_units(kLarge), *device);
  // Two of the units fit beside each other, but not all three.
  ASSERT_GE(placement_of(engine).window_bytes, 2 * 2 * kLarge);
  ASSERT_LT(placement_of(engine).window_bytes, 3 * 2 * kLarge);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  {
    Inference taught = engine.begin_inference();
    for (std::uint32_t use = 0; use < 6; ++use) (void)taught.acquire(UnitId{use % 3}, stream);
  }
  trace_enable(4096);
  {
    Inference inference = engine.begin_inference();
    for (const std::uint32_t unit : {0u, 1u}) (void)inference.acquire(UnitId{unit}, stream);
    const Lease last = inference.acquire(UnitId{2}, stream);
    const Watchdog watchdog(std::chrono::seconds(60),
                            "the first unit of the next batch is not read ahead");
    while (reads()[0] < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  trace_enable(0);
}

TEST_F(InferenceTest, UnitsThatStayAreReadOnce) {
  config_.memory.device_bytes = 1_MiB;
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  Engine engine(config_, three_units(), *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  trace_enable(4096);
  {
    Inference inference = engine.begin_inference();
    for (std::uint32_t use = 0; use < 12; ++use) (void)inference.acquire(UnitId{use % 3}, stream);
  }
  EXPECT_EQ(reads(), (std::vector<std::size_t>{1, 1, 1}));
  trace_enable(0);
}

// The number of times that the schedule had to be changed for an inference with these units.
std::uint32_t changes_of(ScheduleCursor& cursor, const std::vector<std::uint32_t>& units) {
  cursor.begin_inference();
  for (std::uint32_t use = 0; use < units.size(); ++use) {
    const UnitId unit{units[use]};
    if (!cursor.expects(unit, Pass::kInference))
      cursor.follow(cursor.changed({.acquired = use, .fetched = use}, unit, Pass::kInference));
    cursor.advance();
  }
  const std::uint32_t changes = cursor.changes();
  cursor.end(/*is_example=*/true);
  return changes;
}

// The same for one after another of three units.
std::uint32_t changes_of(ScheduleCursor& cursor, std::uint32_t uses) {
  std::vector<std::uint32_t> units;
  for (std::uint32_t use = 0; use < uses; ++use) units.push_back(use % 3);
  return changes_of(cursor, units);
}

TEST_F(InferenceTest, TheNumberOfBatchesIsLearnedInAFewChanges) {
  config_.memory.device_bytes = 1_MiB;
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const ModelSpec model = validated(three_units());
  const Engine engine(config_, model, *device);
  ScheduleCursor cursor(model, layout_of(engine), placement_of(engine));
  EXPECT_EQ(changes_of(cursor, 3 * 9), 4u) << "for 2, 4, 8 and 16 batches";
  EXPECT_EQ(changes_of(cursor, 3 * 9), 0u);
  EXPECT_EQ(changes_of(cursor, 3 * 9 + 3), 1u) << "9 had been expected, and none behind them";
  EXPECT_EQ(changes_of(cursor, 3 * 10), 0u);
  EXPECT_EQ(changes_of(cursor, 4), 0u) << "stops halfway";
  EXPECT_EQ(changes_of(cursor, 3 * 10), 0u);
  EXPECT_EQ(changes_of(cursor, 3), 0u);
  EXPECT_EQ(changes_of(cursor, 3), 0u);
  EXPECT_EQ(changes_of(cursor, 6), 1u) << "one batch had been expected";
}

// A tied head that the model does not declare.
TEST_F(InferenceTest, TheFirstUnitMayBeUsedAgainAtTheEndOfAForward) {
  config_.memory.device_bytes = 1_MiB;
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const ModelSpec model = validated(three_units());
  const Engine engine(config_, model, *device);
  for (const std::uint32_t batches : {1u, 2u, 3u}) {
    ScheduleCursor cursor(model, layout_of(engine), placement_of(engine));
    std::vector<std::uint32_t> units;
    for (std::uint32_t batch = 0; batch < batches; ++batch) units.insert(units.end(), {0, 1, 2, 0});
    EXPECT_GT(changes_of(cursor, units), 0u);
    EXPECT_EQ(cursor.plans().inference().schedule.size(), units.size()) << batches << " batches";
    EXPECT_EQ(changes_of(cursor, units), 0u);
    EXPECT_EQ(cursor.plans().inference().schedule.size(), units.size());
  }
}

TEST_F(InferenceTest, AForwardThatStopsBeforeATiedHeadIsNoBatch) {
  config_.memory.device_bytes = 1_MiB;
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  ModelSpec tied = three_units();
  tied.forward_order = {UnitId{0}, UnitId{1}, UnitId{2}, UnitId{0}};
  const ModelSpec model = validated(tied);
  const Engine engine(config_, model, *device);
  ScheduleCursor cursor(model, layout_of(engine), placement_of(engine));
  EXPECT_EQ(changes_of(cursor, {0, 1, 2}), 0u);
  EXPECT_EQ(changes_of(cursor, {0, 1, 2, 0}), 0u);
  EXPECT_EQ(changes_of(cursor, {0, 1, 2, 0, 0, 1, 2, 0}), 1u);
  EXPECT_EQ(changes_of(cursor, {0, 1, 2, 0}), 0u);
  EXPECT_EQ(changes_of(cursor, {0, 1, 2, 0, 0, 1, 2, 0}), 1u) << "one batch had been expected";
}

TEST_F(InferenceTest, TheActivationsOfABatchAreReleasedBeforeTheNext) {
  ModelSpec model = three_units();
  model.boundary_bytes = {4_KiB, 4_KiB};
  config_.activations.home = ActivationHome::kRecompute;
  config_.memory.device_bytes = 1_MiB;
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  Engine engine(config_, model, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  Inference inference = engine.begin_inference();
  const auto batch = [&] {
    (void)inference.save({.boundary = 0}, stream);
    (void)inference.load({.boundary = 0}, stream);
    (void)inference.save({.boundary = 1}, stream);
    return inference.load({.boundary = 1}, stream);
  };
  (void)batch();
  {
    const ActivationLease held = batch();
    const std::string message = expect_error(
        ErrorCode::kInvalidArgument, [&] { (void)inference.save({.boundary = 0}, stream); });
    EXPECT_NE(message.find("1 activations of the batch before are held"), std::string::npos);
  }
  (void)batch();
}

}  // namespace
}  // namespace sluice::test
