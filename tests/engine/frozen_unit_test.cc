// Units without gradients: parameters and nothing else, wherever they live.
#include <atomic>
#include <chrono>
#include <thread>
#include <tuple>

#include <gtest/gtest.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_computation.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

struct FrozenCase {
  std::string name;
  void (*change)(Config& config);
};

void PrintTo(const FrozenCase& value, std::ostream* out) {
  *out << value.name;
}

const FrozenCase kPlaces[] = {
    {"in_memory",
     [](Config& c) {
       c.placement = {TierChoice::kDevice, TierChoice::kHost};
     }},
    {"parameters_host",
     [](Config& c) {
       c.placement = {TierChoice::kHost, TierChoice::kNvme};
     }},
    {"all_nvme",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
     }},
    {"small_budgets", [](Config& c) { c.memory.host_bytes = 900_KiB; }},
};

class FrozenUnit
    : public testing::TestWithParam<std::tuple<FrozenCase, OverlapPolicy, DType, std::uint32_t>> {};

TEST_P(FrozenUnit, KeepsItsParametersAndTheRestTrains) {
  const auto& [place, policy, dtype, micro_batches] = GetParam();
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.precision = {.parameters = dtype,
                      .gradients = dtype == DType::kFp16 ? DType::kFp32 : DType::kBf16};
  config.memory.device_bytes = 300_KiB;
  config.optimizer.overlap = policy;
  config.optimizer.clip_norm = policy == OverlapPolicy::kEager ? 0 : 1;
  place.change(config);
  if (config.placement.parameters == TierChoice::kDevice) config.memory.device_bytes = 8_MiB;
  for (const std::vector<std::uint32_t>& frozen :
       {std::vector<std::uint32_t>{1, 4}, {0}, {0, 1, 2, 3, 4}}) {
    const ToyOptions options{
        .steps = 4, .micro_batches = micro_batches, .evaluate = true, .frozen_units = frozen};
    const ToyResult result = run_toy(config, options);
    const ToyResult oracle = toy_oracle(config, options);
    EXPECT_TRUE(same_training(result, oracle)) << frozen.size() << " units are frozen";
    for (std::size_t step = 0; step < 4; ++step) {
      EXPECT_EQ(result.reports[step].gradient_norm, oracle.reports[step].gradient_norm);
      EXPECT_EQ(result.reports[step].schedule_changes, 0u);
      if (policy != OverlapPolicy::kSerial) continue;
      EXPECT_EQ(result.reports[step].nvme_read_bytes, result.predicted.nvme_read_bytes);
      EXPECT_EQ(result.reports[step].nvme_write_bytes, result.predicted.nvme_write_bytes);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, FrozenUnit,
    testing::Combine(testing::ValuesIn(kPlaces),
                     testing::Values(OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                     OverlapPolicy::kEager, OverlapPolicy::kSpeculative),
                     testing::Values(DType::kBf16, DType::kFp16), testing::Values(1u, 2u)),
    [](const auto& value) {
      return std::get<0>(value.param).name + "_" + std::string(name_of(std::get<1>(value.param))) +
             "_" + (std::get<2>(value.param) == DType::kBf16 ? "bf16_" : "fp16_") +
             std::to_string(std::get<3>(value.param));
    });

TEST(FrozenUnits, TakeNoRoomButForTheirParameters) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.device_bytes = 300_KiB;
  const auto device = make_host_device({.memory_bytes = 300_KiB});
  const Engine all(config, toy_model(), *device);
  const auto other_device = make_host_device({.memory_bytes = 300_KiB});
  const Engine some(config, toy_model({1, 2}), *other_device);
  std::uint64_t elements = 0;
  std::uint64_t gradients = 0;
  std::uint64_t records = 0;
  for (const std::uint32_t unit : {1u, 2u}) {
    elements += layout_of(all).units()[unit].element_count;
    gradients += (layout_of(all).unit_gradient_bytes(UnitId{unit}) + 4095) / 4096 * 4096;
    for (const BlockPlace& block : layout_of(all).blocks_of(UnitId{unit}))
      records += layout_of(all).record_slot_bytes(block.id);
  }
  EXPECT_EQ(placement_of(all).gradient_set_bytes - placement_of(some).gradient_set_bytes,
            gradients);
  EXPECT_EQ(placement_of(all).nvme_record_bytes - placement_of(some).nvme_record_bytes, records);
  EXPECT_EQ(placement_of(all).nvme_parameter_bytes, placement_of(some).nvme_parameter_bytes);
  EXPECT_EQ(layout_of(all).state_bytes() - layout_of(some).state_bytes(), elements * 10);
}

// No gradient follows the work under such a lease, and the next step overwrites what it reads.
TEST(FrozenUnits, AStepEndsBehindTheWorkOnTheirParametersOnAnyStream) {
  const TempDirectory directory;
  const Config config = toy_config(directory.path());
  const ModelSpec model = toy_model({1, 3});
  const auto device = make_host_device({.memory_bytes = 8_MiB});
  Engine engine(config, model, *device);
  engine.initialize(toy_values());
  std::atomic<std::uint32_t> ended = 0;
  const Stream trained(*device, "trained");
  const Stream frozen(*device, "frozen");
  Step step = engine.begin_step({.learning_rate = 1e-2});
  for (const ToyUse& use : planned_uses(validated(model), 1, MicroBatchOrder::kHorizontal)) {
    const bool is_frozen = model.units[index_of(use.unit)].is_frozen;
    const Lease lease = step.acquire(use.unit, use.pass, is_frozen ? frozen : trained);
    if (!is_frozen) continue;
    device->launch(frozen.id(), [&ended] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      ++ended;
    });
  }
  step.finish();
  EXPECT_EQ(ended, 4u);
}

// Leases may end in any order: the lease that is acquired last is not the one that ends last.
TEST(FrozenUnits, AStepEndsBehindTheLeaseThatIsReleasedLast) {
  const TempDirectory directory;
  const Config config = toy_config(directory.path());
  const ModelSpec model = toy_model({1, 3}, /*leases=*/2);
  const auto device = make_host_device({.memory_bytes = 8_MiB});
  Engine engine(config, model, *device);
  engine.initialize(toy_values());
  bool has_ended = false;  // of a work under the lease on unit 0
  const Stream stream(*device, "compute");
  {
    Inference inference = engine.begin_inference();
    Lease first = inference.acquire(UnitId{0}, stream);
    Lease second = inference.acquire(UnitId{1}, stream);
    second.release();
    device->launch(stream.id(), [&has_ended] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      has_ended = true;
    });
    first.release();
  }
  EXPECT_TRUE(has_ended);
}

TEST(FrozenUnits, AModelOfNothingElseIsRefused) {
  try {
    (void)validated(toy_model({0, 1, 2, 3, 4, 5}));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("every unit is frozen"), std::string::npos);
  }
}

TEST(FrozenUnits, BackwardMayLeaveThemOut) {
  ModelSpec model = toy_model({5});
  model.backward_order = {UnitId{0}, UnitId{4}, UnitId{3}, UnitId{2}, UnitId{1}};
  EXPECT_NO_THROW((void)validated(model));
  model.units[5].is_frozen = false;
  EXPECT_THROW((void)validated(model), Error);
}

}  // namespace
}  // namespace sluice::test
