// Ranks that are divided into parts, and norm groups over parts. Ranks of a real launcher: the
// examples of tensor and pipeline parallelism below mpirun.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include <sluice/host_device.h>
#include <sluice/rank_world.h>
#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/local_collectives.h"

namespace sluice::test {
namespace {

// Runs `drive(rank, device, collectives)` on threads that are the ranks of a world.
void on_ranks(std::uint32_t count, const auto& drive) {
  LocalWorld world(count, {.timeout_s = 20, .sum = sum_in_order});
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 1_MiB});
      const auto collectives = world.join(rank, *device);
      drive(rank, *device, *collectives);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(SplitRanks, EqualColorsFormAPart) {
  const std::vector<std::uint32_t> colors{7, 1, 7, 0, 1, 7};
  on_ranks(6, [&](std::uint32_t rank, HostDevice& device, Collectives& whole) {
    const auto part = split_ranks(whole, device, colors[rank]);
    std::vector<std::uint32_t> members;
    for (std::uint32_t other = 0; other < 6; ++other)
      if (colors[other] == colors[rank]) members.push_back(other);
    ASSERT_EQ(part->rank_count(), members.size());
    EXPECT_EQ(members[part->rank()], rank);
    // Another division of the same ranks, used at the same time.
    const auto halves = split_ranks(whole, device, rank / 3);
    EXPECT_EQ(halves->rank_count(), 3u);
    EXPECT_EQ(halves->rank(), rank % 3);
    const auto sum = [&](Collectives& over) {
      std::vector<std::uint64_t> words{rank, 1u << (4 * rank), ~std::uint64_t{0}};
      norm_group_over(over, device).add(words);
      return words;
    };
    std::uint64_t ranks = 0, bits = 0;
    for (const std::uint32_t member : members) {
      ranks += member;
      bits += 1u << (4 * member);
    }
    EXPECT_EQ(sum(*part),
              (std::vector<std::uint64_t>{ranks, bits, std::uint64_t{0} - members.size()}));
    EXPECT_EQ(sum(*halves)[0], rank < 3 ? 3u : 12u);
  });
}

TEST(SplitRanks, TheGroupNamesWhatCountsElsewhere) {
  on_ranks(2, [&](std::uint32_t, HostDevice& device, Collectives& whole) {
    const NormGroup group = norm_group_over(whole, device, {TensorId{3}});
    EXPECT_EQ(group.counted_elsewhere, std::vector{TensorId{3}});
  });
}

// One rank that does not come: the others do not wait forever.
TEST(SplitRanks, ARankThatDoesNotComeIsAnError) {
  LocalWorld world(2, {.timeout_s = 0.3, .sum = sum_in_order});
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const auto other_device = make_host_device({.memory_bytes = 1_MiB});
  const auto other = world.join(1, *other_device);
  const auto whole = world.join(0, *device);
  try {
    (void)split_ranks(*whole, *device, 0);
    FAIL() << "the other rank has not come";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kRanks);
  }
}

// The words take 4 KiB of the device.
TEST(SplitRanks, AFullDeviceIsAnError) {
  on_ranks(1, [&](std::uint32_t, HostDevice& device, Collectives& whole) {
    const DeviceBuffer all(device, 1_MiB, "all of it");
    try {
      (void)norm_group_over(whole, device);
      FAIL() << "there is no room";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    }
  });
}

}  // namespace
}  // namespace sluice::test
