// An operation of a rank that throws an unforeseen exception. The rank's other sequences, which
// may wait for a rank that does not come, end with it.
#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/host_collectives.h"
#include "tests/gpu/ranks/socket_ranks.h"

namespace sluice {
namespace {

void sum_without_memory(const OrderedSum&) {
  throw std::bad_alloc();
}

std::string message_of(Device& device, const Stream& stream) {
  try {
    device.synchronize(stream.id());
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no failure";
}

// As the ranks of two hosts see them: ranks 0 and 1 on one, rank 2 on the other.
std::vector<std::string> endpoints_seen_by(std::uint32_t rank, const Doors& meeting) {
  std::vector<std::string> endpoints = meeting.endpoints;
  for (std::uint32_t other = 0; other < endpoints.size(); ++other)
    if ((other == 2) != (rank == 2)) endpoints[other] += "x";
  return endpoints;
}

class UnforeseenFailure : public testing::TestWithParam<RankPath> {};

TEST_P(UnforeseenFailure, OfASumEndsWaitsForOtherHosts) {
  const Doors meeting(3);
  std::barrier<> together(3);
  const auto run = [&](std::uint32_t rank) {
    const HostCollectivesOptions options{
        .timeout_s = 5, .sum = rank == 0 ? sum_without_memory : sum_in_order, .path = GetParam()};
    const auto device = make_host_device({.memory_bytes = 16_MiB});
    SocketWorld world(options, *meeting.doors[rank], endpoints_seen_by(rank, meeting));
    // A device tells of its first failure alone, so what waits has a device of its own.
    const auto waiting_device = make_host_device({.memory_bytes = 1_MiB});
    const auto all = world.join(*device);
    const auto waits = world.join(*waiting_device);
    const std::vector<std::uint32_t> host =
        rank == 2 ? std::vector<std::uint32_t>{2} : std::vector<std::uint32_t>{0, 1};
    const auto near = all->open(host);
    if (rank != 2) {
      const Stream waiting(*waiting_device, "waiting");
      const Stream adding(*device, "adding");
      const DeviceBuffer data(*device, 1_MiB, "a test");
      if (rank == 0) waits->barrier("all hosts", waiting.id());  // rank 2 does not come
      near->reduce_scatter({.target = data.data(),
                            .target_type = DType::kFp32,
                            .source = data.data() + 4096,
                            .source_type = DType::kFp32,
                            .shard_elements = 1000,
                            .subject = "sum"},
                           adding.id());
      const std::string message = message_of(*device, adding);
      if (rank == 0) {
        EXPECT_EQ(message, std::bad_alloc().what());
        EXPECT_EQ(message_of(*waiting_device, waiting), std::bad_alloc().what());
      }
    }
    together.arrive_and_wait();
  };
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 3; ++rank) threads.emplace_back([&, rank] { run(rank); });
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Paths, UnforeseenFailure,
                         testing::Values(RankPath::kBest, RankPath::kMessages));

// Collectives that have no memory for any operation.
class FullCollectives final : public HostCollectives {
 public:
  explicit FullCollectives(HostDevice& device)
      : HostCollectives(device, std::make_shared<RankFailure>(), RankGroup::world(0, 2)) {}

  using HostCollectives::failure;
  std::string_view name() const override { return "full"; }
  std::unique_ptr<Collectives> open(std::span<const std::uint32_t>) override {
    (void)agree_on_maximum(1, "opening");
    return nullptr;
  }
  void abort(std::string_view) noexcept override {}

 private:
  void run(const AllGather&, std::uint64_t) override { throw std::bad_alloc(); }
  void run(const ReduceScatter&, std::uint64_t) override { throw std::bad_alloc(); }
  void run(const AllReduce&, std::uint64_t) override { throw std::bad_alloc(); }
  void run(const AllReduceIntegers&, std::uint64_t) override { throw std::bad_alloc(); }
  void run(const Broadcast&, std::uint64_t) override { throw std::bad_alloc(); }
  void run(const Barrier&, std::uint64_t) override { throw std::bad_alloc(); }
};

TEST(UnforeseenFailureOfAnOpening, IsLatched) {
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  FullCollectives collectives(*device);
  const std::array<std::uint32_t, 2> all = {0, 1};
  EXPECT_THROW((void)collectives.open(all), std::bad_alloc);
  EXPECT_TRUE(collectives.failure()->is_set());
}

}  // namespace
}  // namespace sluice
