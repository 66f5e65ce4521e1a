#include "engine/plan/step_plans.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <sluice/units.h>
#include "engine/plan/placement_planner.h"

namespace sluice {
namespace {

constexpr MicroBatchOrder kHorizontal = MicroBatchOrder::kHorizontal;
constexpr MicroBatchOrder kVertical = MicroBatchOrder::kVertical;

// A hundred units of 2 KiB, all of whose state is on storage.
class StepPlansTest : public testing::Test {
 protected:
  static ModelSpec hundred_units() {
    ModelSpec spec;
    for (int unit = 0; unit < 100; ++unit) {
      const std::string name = "u" + std::to_string(unit);
      spec.units.push_back({name, {{.name = name + ".w", .shape = {1000}}}});
    }
    return validated(spec);
  }

  const ModelSpec model_ = hundred_units();
  const Layout layout_{model_, StateFormat{}, 16384};
  const Placement placement_ = plan_placement(
      layout_, model_, {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme},
      {.device_bytes = 256_KiB, .host_bytes = 16_MiB});
  StepPlans plans_{model_, layout_, placement_};
};

std::size_t heap_bytes() {
  const struct mallinfo2 heap = ::mallinfo2();
  return heap.uordblks + heap.hblkhd;
}

// A program may have another number of micro-batches in each step.
TEST_F(StepPlansTest, OnlyTheLastFewAreKept) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's allocator does not say what it has lent";
#endif
  const auto plan = [this](std::uint32_t first, std::uint32_t last) {
    for (std::uint32_t micro_batches = first; micro_batches <= last; ++micro_batches) {
      for (const MicroBatchOrder order : {kHorizontal, kVertical}) {
        (void)plans_.activations(micro_batches, order);
        (void)plans_.training(micro_batches, order);
        (void)plans_.predict_traffic(micro_batches + 1, order);
      }
    }
  };
  const std::size_t before = heap_bytes();
  plan(60, 64);
  const std::size_t few = heap_bytes() - before;
  plan(30, 64);
  EXPECT_GT(few, 1_MiB);
  EXPECT_LE(heap_bytes() - before, few + few / 4);
}

// The prefetcher follows the plan of the step before until the next one begins.
TEST_F(StepPlansTest, ThoseOfTheLastTwoStepsStay) {
  const ActivationPlan& activations = plans_.activations(3, kHorizontal);
  const StepPlan& before = plans_.training(3, kHorizontal);
  const StepPlan& now = plans_.training(5, kHorizontal);
  for (std::uint32_t micro_batches = 6; micro_batches < 40; ++micro_batches) {
    (void)plans_.activations(micro_batches, kVertical);
    (void)plans_.predict_traffic(micro_batches, kHorizontal);
  }
  EXPECT_EQ(before.schedule.size(), 600u);
  EXPECT_EQ(before.window.uses.size(), 600u);
  EXPECT_EQ(now.schedule.size(), 1000u);
  EXPECT_EQ(activations.accesses.size(), 0u);
  EXPECT_EQ(&plans_.training(3, kHorizontal), &before);
  EXPECT_EQ(&plans_.training(5, kHorizontal), &now);
  EXPECT_EQ(&plans_.activations(3, kHorizontal), &activations);
}

// One rank alone may ask. If that dropped a schedule that all ranks have learned, it would go its
// own way in the next step.
TEST_F(StepPlansTest, PredictionsDropNothing) {
  for (std::uint32_t micro_batches = 1; micro_batches <= 8; ++micro_batches)
    (void)plans_.training(micro_batches, kHorizontal);
  Schedule learned = plans_.training(1, kHorizontal).schedule;
  std::swap(learned[0], learned[1]);
  plans_.expect_training(1, kHorizontal, learned);
  for (std::uint32_t micro_batches = 2; micro_batches <= 8; ++micro_batches)
    (void)plans_.training(micro_batches, kHorizontal);
  for (std::uint32_t micro_batches = 9; micro_batches < 20; ++micro_batches)
    (void)plans_.predict_traffic(micro_batches, kHorizontal);
  EXPECT_EQ(plans_.training(1, kHorizontal).schedule[0].unit, learned[0].unit);
}

// A plan that was dropped is made again, and the same.
TEST_F(StepPlansTest, ADroppedPlanComesBack) {
  const Traffic traffic = plans_.predict_traffic(4, kHorizontal);
  const std::vector<WindowUse> uses = plans_.training(4, kHorizontal).window.uses;
  for (std::uint32_t micro_batches = 5; micro_batches < 40; ++micro_batches)
    (void)plans_.training(micro_batches, kHorizontal);
  EXPECT_EQ(plans_.predict_traffic(4, kHorizontal).nvme_read_bytes, traffic.nvme_read_bytes);
  const StepPlan& again = plans_.training(4, kHorizontal);
  ASSERT_EQ(again.window.uses.size(), uses.size());
  for (std::size_t use = 0; use < uses.size(); ++use) {
    EXPECT_EQ(again.window.uses[use].fetch, uses[use].fetch) << use;
    EXPECT_EQ(again.window.uses[use].offset_bytes, uses[use].offset_bytes) << use;
  }
}

}  // namespace
}  // namespace sluice
