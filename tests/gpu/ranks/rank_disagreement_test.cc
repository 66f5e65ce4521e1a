// Ranks of one host that run different operations at the same point. They exchange through memory,
// so no message tells them of each other's sizes.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "tests/gpu/ranks/socket_ranks.h"

namespace sluice {
namespace {

std::string failure_of(Device& device, const Stream& stream) {
  try {
    device.synchronize(stream.id());
  } catch (const Error& error) {
    return error.what();
  }
  return "no failure";
}

// Small operations go through slots, large ones are read from memory. Neither is taken for the
// other, nor one of another size for its own.
TEST(SocketDisagreement, RanksThatRunDifferentOperationsAreTold) {
  using Operation = std::function<void(Collectives&, std::byte*, StreamId)>;
  constexpr std::uint64_t kLarge = 1_MiB;
  const auto gather = [](std::uint64_t bytes) -> Operation {
    return [bytes](Collectives& ranks, std::byte* data, StreamId stream) {
      ranks.all_gather({.target = data,
                        .source = data + ranks.rank() * bytes,
                        .shard_bytes = bytes,
                        .subject = "gathered"},
                       stream);
    };
  };
  const auto sum = [](std::uint64_t count) -> Operation {
    return [count](Collectives& ranks, std::byte* data, StreamId stream) {
      ranks.all_reduce({.data = data, .element_count = count, .subject = "summed"}, stream);
    };
  };
  const Operation words = [](Collectives& ranks, std::byte* data, StreamId stream) {
    ranks.all_reduce_integers({.data = data, .sum_count = 2, .subject = "words"}, stream);
  };
  const std::pair<Operation, Operation> cases[] = {{gather(8), gather(16)},
                                                   {gather(8), sum(4)},
                                                   {gather(kLarge), gather(2 * kLarge)},
                                                   {gather(kLarge), sum(kLarge)},
                                                   {words, gather(16)}};
  for (std::size_t i = 0; i < std::size(cases); ++i) {
    SCOPED_TRACE(i);
    std::atomic<int> told = 0;
    const HostCollectivesOptions options{.timeout_s = 60, .sum = sum_in_order};
    run_threads(2, options, [&](Collectives& ranks, Device& device) {
      const Stream stream(device, "test");
      const DeviceBuffer data(device, 4 * kLarge, "a test");
      const Operation& own = ranks.rank() == 0 ? cases[i].first : cases[i].second;
      ranks.barrier("the beginning", stream.id());
      own(ranks, data.data(), stream.id());
      const std::string failure = failure_of(device, stream);
      EXPECT_NE(failure, "no failure");
      told += failure.find("another operation or one of another size") != std::string::npos;
    });
    EXPECT_EQ(told, 2) << "one has waited in vain";
  }
}

// Rank 0 waits for a rank that has failed on its own, and does not take it for a late one.
TEST(SocketDisagreement, ARankThatHasFailedIsNamedSoon) {
  const auto begin = std::chrono::steady_clock::now();
  run_threads(2, {.timeout_s = 60, .sum = sum_in_order}, [&](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    const DeviceBuffer data(device, 2_MiB, "a test");
    std::byte* const nowhere = nullptr;
    ranks.broadcast({.data = ranks.rank() == 0 ? nowhere : data.data(),
                     .size_bytes = 1_MiB,
                     .root = 0,
                     .subject = "wte"},
                    stream.id());
    EXPECT_EQ(failure_of(device, stream),
              ranks.rank() == 0
                  ? "rank 1 has not answered rank 0 in broadcast of \"wte\", because it has "
                    "failed; its own message says why"
                  : "rank 1 cannot read the memory of rank 0 in broadcast of \"wte\": Bad address");
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

}  // namespace
}  // namespace sluice
