// The same training in memory, as a yardstick: where it is refused, before anything is made.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include <sluice/units.h>
#include "tests/support/expect_error.h"
#include "tools/gpt/train/memory_comparison.h"

namespace sluice::test {
namespace {

TrainConfig small_training() {
  TrainConfig config;
  config.data_file = "no such file";  // is not opened
  config.order = MicroBatchOrder::kHorizontal;
  return config;
}

TEST(MemoryComparison, IsRefusedWhereTheMemoryDoesNotHoldIt) {
  const HostMemory host{.beside_bytes = 2_MiB, .room = {3_MiB, "this test"}};
  const std::string message = expect_error(
      ErrorCode::kOutOfMemory, [&] { (void)train_in_memory(small_training(), host, {}); });
  for (const char* part :
       {"--compare-memory: the same training in memory does not fit", "leave the option out",
        "but this test leaves 3.00 MiB", "device pools", "host pools", "the application"})
    EXPECT_NE(message.find(part), std::string::npos) << part << "\n" << message;
}

TEST(MemoryComparison, IsRefusedWithSeveralRanks) {
  const HostMemory host{.room = {1_GiB, "this test"}};
  const std::string message = expect_error(ErrorCode::kUnsupported, [&] {
    (void)train_in_memory(small_training(), host, {.rank_count = 2, .init_file = {}});
  });
  EXPECT_NE(message.find("one rank, and 2 train together"), std::string::npos) << message;
}

TEST(MemoryComparison, ComparesTheLossesOfBoth) {
  MemoryComparison comparison;
  comparison.losses = {3, 2};
  EXPECT_TRUE(comparison.has_losses(std::vector<double>{3, 2, 1}));
  EXPECT_TRUE(comparison.has_losses(std::vector<double>{3}));
  EXPECT_FALSE(comparison.has_losses(std::vector<double>{3, 1}));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  comparison.losses = {3, nan};
  EXPECT_TRUE(comparison.has_losses(std::vector<double>{3, nan}));
  EXPECT_FALSE(comparison.has_losses(std::vector<double>{3, 2}));
}

}  // namespace
}  // namespace sluice::test
