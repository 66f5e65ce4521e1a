// Work that takes longer on one rank than the others wait for it.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <sluice/config.h>
#include <sluice/host_device.h>
#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "engine/ranks/ranks.h"
#include "gpu/ranks/local_collectives.h"
#include "tests/support/expect_error.h"

namespace sluice::test {
namespace {

constexpr std::uint32_t kRanks = 3;
constexpr double kTimeoutS = 0.3;
constexpr std::chrono::milliseconds kLong{1000};

void on_every_rank(const std::function<void(Ranks& ranks)>& body) {
  LocalWorld world(kRanks, {.timeout_s = kTimeoutS, .sum = sum_in_order});
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 16_MiB});
      const auto collectives = world.join(rank, *device);
      Ranks ranks(Config::Sharding{}, collectives.get(), *device);
      body(ranks);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(RanksTogetherForLong, TheOthersWaitAsLongAsItTakes) {
  on_every_rank([](Ranks& ranks) {
    for (std::uint32_t slow = 0; slow < 2; ++slow)
      EXPECT_NO_THROW(ranks.together_for_long("long work", [&] {
        if (ranks.rank() == slow) std::this_thread::sleep_for(kLong);
      }));
  });
}

TEST(RanksTogetherForLong, AFailureIsThatOfAll) {
  on_every_rank([](Ranks& ranks) {
    const std::thread::id own = std::this_thread::get_id();
    const std::string message = expect_error(ErrorCode::kNoSpace, [&] {
      ranks.together_for_long("long work", [&] {
        EXPECT_EQ(std::this_thread::get_id(), own);
        if (ranks.rank() != 1) return;
        std::this_thread::sleep_for(kLong);
        throw Error(ErrorCode::kNoSpace, "the disk is full");
      });
    });
    EXPECT_EQ(message.find("the disk is full") == 0, ranks.rank() == 1) << message;
    EXPECT_NO_THROW(ranks.together_for_long("more", [] {}));
  });
}

}  // namespace
}  // namespace sluice::test
