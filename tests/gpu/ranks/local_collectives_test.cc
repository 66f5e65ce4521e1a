// The contract of collectives between threads, and their failures.
#include "gpu/ranks/local_collectives.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <new>
#include <thread>

#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/mpi_collectives.h"
#include "tests/contract/collectives_contract.h"

namespace sluice {
namespace {

void run_threads(std::uint32_t rank_count, const HostCollectivesOptions& options,
                 const RankBody& body) {
  LocalWorld world(rank_count, options);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < rank_count; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 256_MiB});
      const auto collectives = world.join(rank, *device);
      body(*collectives, *device);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

CollectivesFactory factory(std::uint32_t ranks, SumFunction sum, const std::string& name) {
  return {name, [ranks, sum](const RankBody& body) { run_threads(ranks, {.sum = sum}, body); }};
}

INSTANTIATE_TEST_SUITE_P(Local, CollectivesContract,
                         testing::Values(factory(1, sum_in_order_reference, "one"),
                                         factory(2, sum_in_order_reference, "two"),
                                         factory(3, sum_in_order, "three"),
                                         factory(4, sum_in_order, "four")),
                         collectives_factory_name);

const HostCollectivesOptions kImpatient{.timeout_s = 2, .sum = sum_in_order};

// The failure that the rank's stream reports after an operation.
std::string failure_of(Device& device, const Stream& stream) {
  try {
    device.synchronize(stream.id());
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kRanks);
    return error.what();
  }
  return "no failure";
}

TEST(LocalCollectivesFailure, RankThatDoesNotComeIsNamedOnEveryOther) {
  std::atomic<int> named = 0;
  std::atomic<int> heard = 0;
  std::latch named_by_others(2);
  run_threads(3, kImpatient, [&](Collectives& ranks, Device& device) {
    if (ranks.rank() == 1) return named_by_others.wait();
    const Stream stream(device, "test");
    ranks.on_failure([&](const Error&) { ++heard; });
    ranks.barrier("h.3", stream.id());
    const std::string failure = failure_of(device, stream);
    named += failure.starts_with("rank 1 has not reached barrier of \"h.3\" within 2 s") ? 1 : 0;
    named_by_others.count_down();
  });
  EXPECT_EQ(named, 2);
  EXPECT_EQ(heard, 2);
}

// Rank 0 waits for it already, and rank 2 comes later.
TEST(LocalCollectivesFailure, RankThatHasEndedIsNamedAtOnce) {
  std::atomic<int> named = 0;
  run_threads(3, {.timeout_s = 30, .sum = sum_in_order}, [&](Collectives& ranks, Device& device) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50 * ranks.rank()));
    if (ranks.rank() == 1) return;
    const Stream stream(device, "test");
    ranks.barrier("h.3", stream.id());
    const std::string failure = failure_of(device, stream);
    named += failure == "rank 1 has ended, but others wait for it in barrier of \"h.3\"" ? 1 : 0;
  });
  EXPECT_EQ(named, 2);
}

TEST(LocalCollectivesFailure, AbortEndsTheOthersAtOnceWithTheReason) {
  std::atomic<int> named = 0;
  run_threads(3, {.timeout_s = 100, .sum = sum_in_order}, [&](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    if (ranks.rank() == 2) return ranks.abort("the disk is full");
    ranks.barrier("h.3", stream.id());
    named += failure_of(device, stream) == "rank 2 has given up: the disk is full" ? 1 : 0;
  });
  EXPECT_EQ(named, 2);
}

TEST(LocalCollectivesFailure, RanksThatDisagreeAboutTheSequenceAreTold) {
  std::atomic<int> named = 0;
  run_threads(2, kImpatient, [&](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    const DeviceBuffer data(device, 4096, "a test");
    if (ranks.rank() == 0) {
      ranks.broadcast({.data = data.data(), .size_bytes = 8, .subject = "wte"}, stream.id());
    } else {
      ranks.broadcast({.data = data.data(), .size_bytes = 16, .subject = "h.0"}, stream.id());
    }
    const std::string failure = failure_of(device, stream);
    named += failure.find("broadcast of \"wte\"") != std::string::npos &&
             failure.find("broadcast of \"h.0\"") != std::string::npos;
  });
  EXPECT_EQ(named, 2);
}

// Later operations, on any sequence, fail with the first failure and do not wait again.
TEST(LocalCollectivesFailure, FirstFailureIsTheAnswerToAllThatFollows) {
  run_threads(2, {.timeout_s = 2, .sum = sum_in_order}, [](Collectives& ranks, Device& device) {
    const std::uint32_t all[] = {0, 1};
    const auto second = ranks.open(all);
    if (ranks.rank() == 1) return;
    const DeviceBuffer data(device, 4096, "a test");
    {
      const Stream stream(device, "test");
      ranks.barrier("first", stream.id());
      EXPECT_NE(failure_of(device, stream).find("\"first\""), std::string::npos);
      second->broadcast({.data = data.data(), .size_bytes = 8, .subject = "second"}, stream.id());
      const std::string failure = failure_of(device, stream);
      EXPECT_NE(failure.find("\"first\""), std::string::npos) << failure;
      EXPECT_EQ(failure.find("\"second\""), std::string::npos) << failure;
    }
    std::string heard;
    second->on_failure([&](const Error& error) { heard = error.what(); });
    EXPECT_NE(heard.find("\"first\""), std::string::npos);
  });
}

TEST(MpiWorld, MissingLibraryIsAnErrorThatNamesIt) {
  try {
    const MpiWorld world({.sum = sum_in_order}, "/nowhere/libsluice_mpi.so");
    FAIL() << "it was opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    for (const char* const name : {"/nowhere/libsluice_mpi.so", "sluice-mpi"})
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
  }
}

std::atomic<bool> sum_fails = false;

void failing_sum(const OrderedSum& sum) {
  if (sum_fails.exchange(false)) throw std::bad_alloc();
  sum_in_order(sum);
}

// The rank no longer reads the others' memory, so they need not wait for that.
TEST(LocalCollectivesFailure, ASumThatFailsOnOneRankEndsTheOthers) {
  sum_fails = true;
  std::atomic<int> told = 0;
  run_threads(3, {.timeout_s = 2, .sum = failing_sum}, [&](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    const DeviceBuffer data(device, 4096, "a test");
    ranks.all_reduce({.data = data.data(), .element_count = 64, .subject = "wte"}, stream.id());
    try {
      device.synchronize(stream.id());
    } catch (const std::exception& error) {
      const std::string message = error.what();
      told += message == std::bad_alloc().what() ||
              message.find("has failed in all_reduce of \"wte\": " +
                           std::string(std::bad_alloc().what())) != std::string::npos;
    }
  });
  EXPECT_EQ(told, 3);
}

}  // namespace
}  // namespace sluice
