// Collectives between ranks of one host, without MPI: ranks are threads that share a segment, and
// read each other's memory as processes do, by the system's call. The contract on both paths, and
// failures.
#include "gpu/ranks/host_exchange.h"

#include <gtest/gtest.h>

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <thread>

#include <fmt/format.h>

#include "base/aligned_buffer.h"
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/shared_segment.h"
#include "tests/contract/collectives_contract.h"
#include "tests/gpu/ranks/thread_port.h"

namespace {

// Permissions to read this process's memory: which process got the last, and how often it was given
// since it was taken back.
std::atomic<int> permitted{0};
std::atomic<int> permits{0};

}  // namespace

// Stands before that of libc, since few systems here have Yama, which the permission is for.
extern "C" int prctl(int option, ...) {
  va_list arguments;
  va_start(arguments, option);
  const auto process = va_arg(arguments, int);
  va_end(arguments);
  if (option != PR_SET_PTRACER) return static_cast<int>(::syscall(SYS_prctl, option, process));
  if (process != 0) permitted = process;
  permits = process == 0 ? 0 : permits + 1;
  return 0;
}

namespace sluice {
namespace {

// When a rank says no although it could say yes: the first time that all say whether they can read
// each other's memory, and the second, when their parents may.
constexpr int kReading = 3;
constexpr int kReadingWithPermit = 5;

class ExchangeCollectives final : public HostCollectives {
 public:
  ExchangeCollectives(HostDevice& device, std::shared_ptr<RankFailure> failure,
                      const HostNeighbors& neighbors, const HostCollectivesOptions& options,
                      RankGroup group, std::shared_ptr<std::uint32_t> opened)
      : HostCollectives(device, std::move(failure), std::move(group)),
        neighbors_(neighbors),
        options_(options),
        opened_(std::move(opened)),
        staging_(HostExchange::kStagingBytes, "staging"),
        exchange_(neighbors_, options_, *this->failure(), this->group(), (*opened_)++,
                  staging_.span()) {}

  std::string_view name() const override { return "exchange"; }
  std::unique_ptr<Collectives> open(std::span<const std::uint32_t> ranks) override {
    *opened_ = static_cast<std::uint32_t>(agree_on_maximum(*opened_, "opening"));
    return std::make_unique<ExchangeCollectives>(device(), failure(), neighbors_, options_,
                                                 group().subgroup(ranks), opened_);
  }
  void abort(std::string_view) noexcept override {}
  using HostCollectives::failure;

 private:
  void run(const AllGather& gather, std::uint64_t) override { exchange_.run(gather); }
  void run(const ReduceScatter& reduce, std::uint64_t) override { exchange_.run(reduce); }
  void run(const AllReduce& reduce, std::uint64_t) override { exchange_.run(reduce); }
  void run(const AllReduceIntegers& reduce, std::uint64_t) override { exchange_.run(reduce); }
  void run(const Broadcast& broadcast, std::uint64_t) override { exchange_.run(broadcast); }
  void run(const Barrier& barrier, std::uint64_t) override { exchange_.run(barrier); }

  const HostNeighbors& neighbors_;
  const HostCollectivesOptions& options_;
  std::shared_ptr<std::uint32_t> opened_;
  AlignedBuffer staging_;
  HostExchange exchange_;
};

using ExchangeBody = std::function<void(ExchangeCollectives& ranks, HostDevice& device)>;

void run_threads(std::uint32_t rank_count, const HostCollectivesOptions& options,
                 const ExchangeBody& body) {
  SharedHost host(rank_count);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < rank_count; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadPort port(host, rank);
      const HostNeighbors neighbors(port);
      const auto device = make_host_device({.memory_bytes = 256_MiB});
      ExchangeCollectives collectives(*device, std::make_shared<RankFailure>(), neighbors, options,
                                      RankGroup::world(rank, rank_count),
                                      std::make_shared<std::uint32_t>(0));
      body(collectives, *device);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

CollectivesFactory factory(std::uint32_t ranks, RankPath path, const std::string& name) {
  return {name, [ranks, path](const RankBody& body) {
            const HostCollectivesOptions options{
                .timeout_s = 100, .sum = sum_in_order, .path = path};
            run_threads(ranks, options, body);
          }};
}

INSTANTIATE_TEST_SUITE_P(Exchange, CollectivesContract,
                         testing::Values(factory(2, RankPath::kBest, "two"),
                                         factory(3, RankPath::kBest, "three"),
                                         factory(4, RankPath::kBest, "four"),
                                         factory(2, RankPath::kReading, "two_reading"),
                                         factory(3, RankPath::kReading, "three_reading"),
                                         factory(4, RankPath::kReading, "four_reading")),
                         collectives_factory_name);

// The failure that the rank's stream reports after an operation.
std::string failure_of(HostDevice& device, const Stream& stream) {
  try {
    device.synchronize(stream.id());
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kRanks);
    return error.what();
  }
  return "no failure";
}

// How often ranks 0 and 2 say that they wait for rank 1, until they fail.
int told_of_rank_that_does_not_come(double timeout_s) {
  std::atomic<int> named = 0;
  std::atomic<int> said = 0;
  const HostCollectivesOptions options{
      .timeout_s = timeout_s, .sum = sum_in_order, .on_wait = [&](const std::string& waiting) {
        said += waiting.starts_with("rank 1 has not answered rank ") ? 1 : 0;
      }};
  run_threads(3, options, [&](Collectives& ranks, HostDevice& device) {
    if (ranks.rank() == 1) return;
    const Stream stream(device, "test");
    ranks.barrier("h.3", stream.id());
    const std::string failure = failure_of(device, stream);
    const std::string expected = fmt::format(
        "rank 1 has not answered rank {} in barrier of \"h.3\" within {} s; a rank may have been "
        "killed or stopped; if it is only late, raise sharding.timeout",
        ranks.rank(), timeout_s);
    EXPECT_EQ(failure, expected);
    named += failure == expected ? 1 : 0;
  });
  EXPECT_EQ(named, 2);
  return said;
}

// About four times a second, on each; on a machine that is busy, within a longer timeout.
TEST(HostExchange, RankThatDoesNotComeIsNamedOnEveryOther) {
  double timeout_s = 0.6;
  while (timeout_s < 10 && told_of_rank_that_does_not_come(timeout_s) < 2) timeout_s *= 2;
  EXPECT_LT(timeout_s, 10);
}

// Its memory has changed since; on either path it is as if the rank had never answered.
TEST(HostExchange, WhatAFailedRankHadPublishedIsNoResult) {
  for (const std::uint64_t size_bytes : {std::uint64_t{1000}, std::uint64_t{1_MiB}}) {
    std::atomic<bool> has_failed = false;
    const HostCollectivesOptions options{.timeout_s = 0.3, .sum = sum_in_order};
    run_threads(2, options, [&](Collectives& ranks, HostDevice& device) {
      const Stream stream(device, "test");
      const DeviceBuffer data(device, size_bytes * 2, "a test");
      const auto gather = [&] {
        ranks.all_gather({.target = data.data(),
                          .source = data.data() + ranks.rank() * size_bytes,
                          .shard_bytes = size_bytes,
                          .subject = "wte"},
                         stream.id());
        return failure_of(device, stream);
      };
      if (ranks.rank() == 0) {
        EXPECT_NE(gather().find("rank 1 has not answered rank 0"), std::string::npos);
        std::memset(data.data(), 1, size_bytes);
        has_failed = true;
        has_failed.notify_one();
      } else {
        std::memset(data.data(), 2, size_bytes * 2);
        has_failed.wait(false);
        EXPECT_NE(gather().find("rank 0 has not answered rank 1"), std::string::npos);
        EXPECT_EQ(data.data()[0], std::byte{2});
      }
    });
  }
}

TEST(HostExchange, FailureElsewhereEndsAWaitAtOnce) {
  const HostCollectivesOptions options{.timeout_s = 1000, .sum = sum_in_order};
  run_threads(2, options, [&](ExchangeCollectives& ranks, HostDevice& device) {
    if (ranks.rank() == 1) return;
    const Stream stream(device, "test");
    ranks.barrier("h.3", stream.id());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ranks.failure()->set(Error(ErrorCode::kRanks, "another sequence has failed"));
    EXPECT_EQ(failure_of(device, stream), "another sequence has failed");
  });
}

// Rank 1 says that its data is where there is no memory.
TEST(HostExchange, MemoryThatCannotBeReadIsAFailureThatSaysWhy) {
  const HostCollectivesOptions options{.timeout_s = 2, .sum = sum_in_order};
  run_threads(2, options, [&](Collectives& ranks, HostDevice& device) {
    const Stream stream(device, "test");
    const DeviceBuffer data(device, 2_MiB, "a test");
    std::byte* const nowhere = nullptr;
    ranks.broadcast({.data = ranks.rank() == 1 ? nowhere : data.data(),
                     .size_bytes = 1_MiB,
                     .root = 1,
                     .subject = "wte"},
                    stream.id());
    const std::string failure = failure_of(device, stream);
    if (ranks.rank() == 0) {
      EXPECT_EQ(failure,
                "rank 0 cannot read the memory of rank 1 in broadcast of \"wte\": Bad address");
    } else {
      EXPECT_NE(failure.find("rank 0 has not answered rank 1"), std::string::npos) << failure;
    }
  });
}

// A rank that may not read the others' memory takes all of them to messages, unless it may when
// they have permitted it. No rank permits it without need, or for longer than needed.
TEST(HostNeighbors, NobodyHasAnyWhereOneIsRefused) {
  struct Case {
    std::vector<int> refused;
    int included;
    int agreements;
    int permits;
  };
  for (const Case& each : {Case{{}, 3, 3, 0}, Case{{1}, 0, 1, 0}, Case{{kReading}, 3, 5, 3},
                           Case{{kReading, kReadingWithPermit}, 0, 5, 0}}) {
    std::atomic<int> included = 0;
    std::barrier<> everyone(3);
    permitted = 0;
    run_ports(3, each.refused, [&](ThreadPort& port) {
      const HostNeighbors neighbors(port);
      const std::uint32_t all[] = {0, 1, 2};
      included += neighbors.include(all) ? 1 : 0;
      EXPECT_EQ(port.agreements(), each.agreements);
      everyone.arrive_and_wait();
      EXPECT_EQ(permits, each.permits);
      everyone.arrive_and_wait();
    });
    EXPECT_EQ(included, each.included) << each.agreements;
    EXPECT_EQ(permits, 0) << "a permission is not taken back";
    EXPECT_EQ(permitted, each.agreements == 5 ? ::getppid() : 0);
  }
}

// The number of its process may be another one's by then, whose memory is not read as the rank's.
TEST(HostNeighbors, RankThatHasEndedIsNotRead) {
  std::barrier<> both(2);
  std::byte memory[64] = {};
  run_ports(2, {}, [&](ThreadPort& port) {
    auto neighbors = std::make_unique<HostNeighbors>(port);
    const auto read = [&] {
      std::byte target[sizeof memory];
      return neighbors->read(1, reinterpret_cast<std::uint64_t>(memory), target, sizeof target);
    };
    if (port.rank() == 0) {
      EXPECT_EQ(read(), 0);
    }
    both.arrive_and_wait();
    if (port.rank() == 1) neighbors.reset();
    both.arrive_and_wait();
    if (port.rank() == 0) {
      EXPECT_EQ(read(), ESRCH);
    }
    both.arrive_and_wait();
  });
}

// The kernel moves no more than this in one call, so that the proof of it has to come by another.
// Many views of little memory are the target.
TEST(HostNeighbors, AsMuchAsTheKernelMovesInOneCallIsRead) {
  constexpr std::uint64_t kBytes = 2_GiB - 4_KiB;
  constexpr std::uint64_t kViewBytes = 64_MiB;
  const auto reserve = [] {
    return static_cast<std::byte*>(::mmap(nullptr, 2_GiB, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  };
  std::byte* const source = reserve();
  std::byte* const target = reserve();
  ASSERT_NE(source, MAP_FAILED);
  ASSERT_NE(target, MAP_FAILED);
  const SharedSegment memory = SharedSegment::make(kViewBytes);
  for (std::uint64_t at = 0; at < 2_GiB; at += kViewBytes)
    ASSERT_EQ(::mmap(target + at, kViewBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                     static_cast<int>(memory.place().descriptor), 0),
              target + at);
  source[kBytes - 1] = std::byte{42};
  std::barrier<> both(2);
  run_ports(2, {}, [&](ThreadPort& port) {
    const HostNeighbors neighbors(port);
    if (port.rank() == 0) {
      EXPECT_EQ(neighbors.read(1, reinterpret_cast<std::uint64_t>(source), target, kBytes), 0);
    }
    both.arrive_and_wait();
  });
  EXPECT_EQ(target[kBytes - 1], std::byte{42});
  ::munmap(source, 2_GiB);
  ::munmap(target, 2_GiB);
}

// Things that another user could put in its place, or a process that is not the announced one.
TEST(SharedSegment, OpensNothingButWhatWasMade) {
  constexpr std::uint64_t kBytes = 64_KiB;
  const SharedSegment made = SharedSegment::make(kBytes);
  ASSERT_NE(made.data(), nullptr);
  made.data()[5] = std::byte{42};
  const SegmentPlace place = made.place();
  const SharedSegment opened = SharedSegment::open(place, kBytes);
  ASSERT_NE(opened.data(), nullptr);
  EXPECT_EQ(opened.data()[5], std::byte{42});
  const SharedSegment other = SharedSegment::make(kBytes);
  SegmentPlace wrong = place;
  wrong.descriptor = other.place().descriptor;
  EXPECT_EQ(SharedSegment::open(wrong, kBytes).data(), nullptr) << "another file";
  EXPECT_EQ(SharedSegment::open(place, 2 * kBytes).data(), nullptr) << "another size";
  EXPECT_EQ(SharedSegment::open({}, kBytes).data(), nullptr) << "none";
  const std::string path = fmt::format("/proc/self/fd/{}", place.descriptor);
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777u, 0600u);
  EXPECT_EQ(status.st_nlink, 0u) << "it has a name";
  EXPECT_NE(::truncate(path.c_str(), 0), 0) << "it can be cut short under those who have it";
}

}  // namespace
}  // namespace sluice
